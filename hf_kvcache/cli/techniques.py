"""`hf-kvcache techniques`: the twelve families, what each cuts, and the options of the ones that work."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Table

from hf_kvcache.cli.output import AsJson, Threads, set_threads, show, show_json

if TYPE_CHECKING:
    from hf_kvcache.registry import Family, Option


def techniques(as_json: AsJson = False, threads: Threads = None) -> None:
    """List the techniques: number, names for --cache, what they cut, exact or approximate, options."""
    set_threads(threads)
    from hf_kvcache.registry import CATALOG

    if as_json:
        show_json([_as_dict(family) for family in CATALOG])
        return
    table = Table("#", "technique", "--cache", "cuts", "result", "options (--set name=value)", "status")
    for family in CATALOG:
        names, options = "\n".join(family.names) or "-", _options_text(family)
        result = "exact" if family.exact else "approximate"
        table.add_row(str(family.number), family.title, names, family.cuts, result, options, family.status)
    show(table)


def _options_text(family: "Family") -> str:
    from hf_kvcache.registry import TECHNIQUES

    lines = []
    for name in family.names:
        options = [f"{option.name}={_default_text(option)}" for option in TECHNIQUES[name].options]
        lines.append(f"{name}: {', '.join(options)}" if len(family.names) > 1 else ", ".join(options))
    return "\n".join(lines)


def _default_text(option: "Option") -> str:
    return str(option.default) if isinstance(option.default, str) else repr(option.default)


def _as_dict(family: "Family") -> dict[str, Any]:
    from hf_kvcache.registry import TECHNIQUES

    described = asdict(family)
    described["techniques"] = [
        {
            "name": name,
            "summary": TECHNIQUES[name].summary,
            "exact": TECHNIQUES[name].exact,
            "options": [
                {"name": option.name, "type": option.type_name, "default": option.default, "help": option.help}
                for option in TECHNIQUES[name].options
            ],
        }
        for name in family.names
    ]
    return described
