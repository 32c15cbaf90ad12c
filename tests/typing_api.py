"""Type hints as part of the API: mypy and pyright check this file, but it is never run."""

from typing import assert_type

import atts


async def an_engine_is_typed(engine: atts.Engine) -> None:
    request = atts.SampleRequest(
        ids=(1, 2), max_tokens=4, sampling=atts.Sampling(temperature=0.7), seed=atts.Seed(1)
    )
    assert_type(await engine.sample(request), atts.Completion)
    assert_type(await engine.score(atts.ScoreRequest(prefix=(1,), suffix=(2,))), atts.Scores)
    assert_type((await engine.score(atts.ScoreRequest((1,), (2,)))).perplexity, float)


def decisions_say_what_to_do(decision: atts.Decision) -> None:
    assert_type(decision.escalate, bool)
    assert_type(decision.p, float | None)
