"""Write docs/lifecycle.md: the diagrams of the transition tables the control core moves along."""

from pathlib import Path

from easerve.policy.lifecycle import LEG, REQUEST

PAGE = Path(__file__).parents[1] / "docs" / "lifecycle.md"
TEXT = """\
# Life of a request

Drawn from the tables in `src/easerve/policy/lifecycle.py` by `scripts/lifecycle_diagram.py`; change
the tables, then run the script. The control core makes no move that is not here.

A request is admitted or rejected when it is received, before any work. It is prepared (media
decoded and checked, prompt tokenised), its media are encoded, and it is answered by as many legs
as it wants choices. It ends completed, failed or cancelled.

```mermaid
{request}
```

A leg is one prefill and the decode that pulls its KV cache. A KV handle is used once, so a leg that
is tried again, or that finds an embedding missing, goes back to prefill with a new attempt number.

```mermaid
{leg}
```
"""


def page() -> str:
    return TEXT.format(request=REQUEST.mermaid(), leg=LEG.mermaid())


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page())
