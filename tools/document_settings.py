"""Writes docs/settings.md, which lists every setting, from the declarations.

python -m tools.document_settings
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from minitf import checks, settings
from minitf.command_line import limits, readers
from minitf.config import Config, type_name
from minitf.settings import Field

PAGE = Path(__file__).parent.parent / "docs" / "settings.md"
HEAD = """# Settings

Written by `python -m tools.document_settings` from the declarations; do not edit. `python -m minitf.train --help_settings [NAME]`
prints the same in a terminal. A config file sets `c.NAME = VALUE`, a command line `--config.NAME=VALUE`. A run that resumes keeps
all settings but those marked *may change*.
"""


def row(f: Field) -> str:
    cells = [f"`{f.name}`", type_name(f.kind).replace("|", "\\|") + " or None" * f.optional, f"`{f.default!r}`"]
    notes = [f.setting.meaning]
    notes += [limits(f)] * bool(limits(f))
    notes += [f"read by {', '.join(f'`{r}`' for r in readers(f.name))}"] * bool(readers(f.name))
    notes += ["*may change*"] * f.setting.may_change
    kinds = [f"`{kind}`: {meaning}" for kind, meaning in checks.kinds(f.setting).items()]
    return "| " + " | ".join([*cells, "<br>".join(["; ".join(notes), *kinds])]) + " |"


def lines() -> Iterator[str]:
    yield HEAD
    section = None
    for f in settings.fields(Config):
        if (now := f.name.rpartition(".")[0]) != section:
            section = now
            yield f"\n## {f'`{section}`' if section else 'The run'}\n\n| setting | type | default | meaning |\n|---|---|---|---|"
        yield row(f)


def page() -> str:
    return "\n".join(lines()) + "\n"


def main() -> int:
    PAGE.write_text(page())
    print(f"wrote {PAGE.name}: {len(settings.fields(Config))} settings", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
