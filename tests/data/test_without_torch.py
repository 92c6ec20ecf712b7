"""The data room without torch: a curation, its report and the listing of techniques run where torch is not installed, and other stages say what is missing."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib

import pytest

from tests.conftest import ROOT
from tests.data.stories import story

ABSENT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in ('torch', 'tensorboard', 'triton'):
            raise ModuleNotFoundError(f'No module named {name!r}', name=name)
sys.meta_path.insert(0, Absent())
from hone.cli import main
"""


def run(code: str, folder, absent: str = ABSENT) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", absent + code], cwd=folder, capture_output=True, text=True)


@pytest.mark.slow
def test_a_curation_runs_without_torch(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        rows = [json.dumps({"text": story(ord(name) * 100 + number)}) for number in range(12)]
        (tmp_path / name / "rows.jsonl").write_text("\n".join(rows))
    done = run(
        "code = main(['data', 'a', 'b', '--out=out', '--filters=[length]', '--tokenizer.vocab_size=300', '--quiet'])\n"
        "assert 'torch' not in sys.modules\n"
        "code += main(['show', 'out']) + main(['techniques', 'dedup']) + main(['techniques'])\n"
        "sys.exit(code)",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out" / "stats.json").read_text())["sources"].keys() == {"a/", "b/"}
    assert "minhash" in done.stdout and "not listed, since torch is not installed" in done.stdout


def test_other_stages_say_what_is_missing(tmp_path):
    done = run("sys.exit(main(['train', 'out', '--out=model']))", tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    done = run("import hone\nhone.load('model')", tmp_path)
    assert "this needs the package 'torch'" in done.stderr and "pip install 'hone-llm[models]'" in done.stderr


def test_a_curation_without_pyarrow_says_what_is_missing(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "some text"}')
    absent = ABSENT.replace("'torch', 'tensorboard', 'triton'", "'pyarrow'")
    done = run("sys.exit(main(['data', 'rows.jsonl', '--out=out']))", tmp_path, absent)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "needs the package 'pyarrow'" in done.stderr and "pip install 'hone-llm[data]'" in done.stderr


@pytest.mark.parametrize("package", ["pyarrow", "numba"])
def test_the_plan_of_a_recipe_names_the_stage_that_misses_a_package(package, tmp_path):
    absent = ABSENT.replace("'torch', 'tensorboard', 'triton'", f"'{package}',")
    done = run(f"sys.exit(main(['plan', {str(ROOT / 'recipes' / 'tiny.yaml')!r}]))", tmp_path, absent)
    assert "Traceback" not in done.stderr
    assert f"the data stage needs the package '{package}'" in done.stdout + done.stderr


def test_the_data_extra_does_not_pull_torch():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    light = [*project["dependencies"], *extras["data"]]
    assert not [one for one in light if one.startswith(("torch", "triton", "tensorboard", "hone-llm"))]
    assert any(one.startswith("torch>") for one in extras["models"])
    assert "hone-llm[models]" in extras["serve"] and set(extras["all"]) == {"hone-llm[data,models,serve]"}


def test_the_help_of_redecide_needs_no_pyarrow(tmp_path):
    absent = ABSENT.replace("'torch', 'tensorboard', 'triton'", "'pyarrow'")
    done = run("sys.exit(main(['redecide', '--help']))", tmp_path, absent)
    assert done.returncode == 0 and "--filters.N.FIELD=VALUE" in " ".join(done.stdout.split()), done.stderr
    done = run("sys.exit(main(['redecide', 'out']))", tmp_path, absent)
    assert done.returncode == 2 and "redecide needs the package 'pyarrow'" in done.stderr


def test_the_package_of_a_format_is_named_before_anything_is_read(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.pdf").write_bytes(b"%PDF-1.4")
    (tmp_path / "in" / "b.txt").write_text("some text")
    absent = ABSENT.replace("'torch', 'tensorboard', 'triton'", "'pypdfium2'")
    done = run("sys.exit(main(['data', 'in', '--out=out']))", tmp_path, absent)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "reading a.pdf as pdf needs the package 'pypdfium2'" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
