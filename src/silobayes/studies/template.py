"""A commented study file to start from, with just the keys of one method."""

import dataclasses
from importlib import resources

from silobayes.core.errors import InvalidInput
from silobayes.privacy.relation import Unit
from silobayes.studies.method import Method, Methods, default_of

_COLUMN = 34


def template(method: Method, *, is_default: bool) -> str:
    """The text of a study file; the default method is not named in it, so that the model may choose another one.

    Guarantees:
        - the template shows every key
    """
    text = resources.files("silobayes").joinpath("study_template.toml").read_text(encoding="utf-8")
    mode, unit = ("dp" if method.units else "none"), (method.units or (Unit.ROW,))[0].value
    text = text.replace('mode = "dp" ', f'mode = "{mode}" ').replace('unit = "row" ', f'unit = "{unit}" ')
    return text.replace("{protocol}", _section(method, is_default))


def _section(method: Method, is_default: bool) -> str:
    off = "# " if is_default else ""
    lines = [
        "[protocol]",
        _line(
            f"{off}kind", f'"{method.kind}"', "`silobayes methods` lists all; --method writes the keys of another one"
        ),
        _line(f"{off}privatise", f'"{method.privatise}"', method.summary),
    ]
    for field in dataclasses.fields(method.keys):
        if "example" in field.metadata:
            lines.append(_line(f"# {field.name}", field.metadata["example"], field.metadata["meaning"]))
    return "\n".join(lines)


def _line(key: str, value: str, meaning: str) -> str:
    return f"{key} = {value} ".ljust(_COLUMN) + f"# {meaning}"


def by_name(name: str, methods: Methods) -> Method:
    """A method by `kind/privatise`; `kind` alone or `privatise` alone is enough where only one has it, or pvi does."""
    own = {method.name: method for method in methods.values()}
    if name in own:
        return own[name]
    for alike in (f"pvi/{name}", *(key for key in own if key.endswith(f"/{name}"))):
        if alike in own:
            return own[alike]
    of_kind = [method for method in own.values() if method.kind == name]
    if of_kind:
        return default_of(of_kind, Unit.ROW if any(method.units for method in of_kind) else None, False)
    raise InvalidInput("--method", f"one of {', '.join(own)}", name, "`silobayes methods` says what each does.")
