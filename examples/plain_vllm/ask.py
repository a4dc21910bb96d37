"""Send the same long prompt to one server after the other and print what each one reused.

python -m examples.plain_vllm.ask http://127.0.0.1:8001 http://127.0.0.1:8002
"""

import argparse
import time
from collections.abc import Sequence

import httpx

from examples.documents import document, prompt, questions

TIMEOUT = 300.0


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("servers", nargs="+", metavar="URL")
    parser.add_argument("--rows", type=int, default=60, help="rows of the document, 50 tokens each")
    parser.add_argument("--seed", type=int, default=1, help="another seed gives another document")
    options = parser.parse_args(words)
    text = prompt(document(options.seed, options.rows), questions(options.seed, options.rows)[0])
    for server in options.servers:
        with httpx.Client(base_url=server, timeout=TIMEOUT) as client:
            model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
            began = time.perf_counter()
            answer = client.post(
                "/v1/completions",
                json={"model": model, "prompt": text, "max_tokens": 8, "temperature": 0},
            ).raise_for_status()
        seconds = time.perf_counter() - began
        usage = answer.json()["usage"]
        reused = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        print(f"{server}: {seconds:.3f} s, {reused} of {usage['prompt_tokens']} tokens reused")


if __name__ == "__main__":
    main()
