"""Run atts with a draft and a target on two servers, which are given by URL.

    python examples/two_servers.py                                                     # starts two toy servers
    python examples/two_servers.py vllm:http://gpu1:8000/Qwen/Qwen3-1.7B vllm:http://gpu2:8000/Qwen/Qwen3-32B

atts knows the APIs of vLLM, SGLang and llama.cpp; `atts probe URL` lists the features of a server.
"""

import sys

import atts
from atts.servers import RemoteEngine
from atts.testing import DialectServer, ScriptedEngine, ToyTokenizer, toy_problems


def evaluate(draft: str | atts.Engine, target: str | atts.Engine) -> None:
    """Solve eight problems with engines on servers; requests that are lost are sent again."""
    setup = atts.Setup(draft=draft, target=target, rate=0.2, policy=atts.Policy(samples=4))
    result = atts.evaluate_sync(toy_problems(8), setup)
    correct = sum(line.verdict == "correct" for line in result.problems)
    print(
        f"{correct} of {len(result.problems)} correct; {result.usage.scored_tokens} tokens scored by "
        f"the target"
    )


def main(urls: list[str]) -> None:
    """Run on the servers with the given URLs, or start two servers with toy models."""
    if urls:
        evaluate(*urls)
        return
    with (
        DialectServer(lambda: ScriptedEngine("draft"), "vllm") as draft,
        DialectServer(lambda: ScriptedEngine("target"), "sglang") as target,
    ):
        # the toy models need this tokenizer; for real models, atts finds it by the name of the
        # model
        words = ToyTokenizer()
        evaluate(
            RemoteEngine(draft.url, name="draft", tokenizer=words),
            RemoteEngine(target.url, name="target", tokenizer=words),
        )


if __name__ == "__main__":
    main(sys.argv[1:])
