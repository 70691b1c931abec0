"""The client asks the real server over fake engines."""

from easerve.bench.client import Planned, run_load
from easerve.config import Deployment
from tests.serve.server import MODEL, Server, answer_words, ask_about, body, picture


async def test_the_real_server() -> None:
    server = Server(Deployment.model_validate({"model": MODEL}))
    await server.start()
    try:
        requests = [
            Planned(0, body("hello")),
            Planned(0.01, body(ask_about("what?", picture("red")))),
            Planned(0.02, body("hello", model="unknown")),
        ]
        samples = await run_load(server.url, MODEL, requests)
        await server.idle()
    finally:
        await server.stop()
    records = [sample.record for sample in samples]
    assert [record.outcome for record in records] == ["completed", "completed", "failed"]
    expected = [answer_words("hello"), answer_words("what?", picture("red"))]
    assert [record.num_output_tokens for record in records[:2]] == list(map(len, expected))
    assert all(record.ttft_s is not None for record in records[:2])
