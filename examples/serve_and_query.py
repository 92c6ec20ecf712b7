"""Serves a model folder and asks it with the openai client: a completion, a stream, and one of given answers.

python examples/serve_and_query.py MODEL
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import openai

CHOICES = ["Oslo", "Rome", "Lima"]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("model", help="a folder that hone wrote, or of Hugging Face form")
    options.add_argument("--prompt", default="import ")
    options.add_argument("--max-tokens", type=int, default=32)
    options.add_argument("--device", default="cpu")
    given = options.parse_args()

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "hone", "serve", given.model, f"--port={port}", f"--device={given.device}"]
    server = subprocess.Popen(command)
    try:
        wait_until_ready(f"http://127.0.0.1:{port}/health", server)
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as client:
            model = client.models.list().data[0].id
            asked = {"model": model, "prompt": given.prompt, "max_tokens": given.max_tokens, "temperature": 0}
            print("completion:", client.completions.create(**asked).choices[0].text)
            print("stream: ", end="")
            for part in client.completions.create(**asked, stream=True):
                print(part.choices[0].text, end="", flush=True)
            print()
            reply = client.completions.create(**asked, extra_body={"structured_outputs": {"choice": CHOICES}})
            print("one of three:", reply.choices[0].text)
    finally:
        server.terminate()
        server.wait()


def wait_until_ready(url: str, server: subprocess.Popen) -> None:
    """Returns when the server answers. A large model takes minutes to read."""
    while server.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except (urllib.error.URLError, TimeoutError):
            time.sleep(0.2)
    sys.exit(f"the server ended with code {server.returncode}")


if __name__ == "__main__":
    main()
