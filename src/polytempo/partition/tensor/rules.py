"""Rules by name: the way of each split layer of a model; also as text, `*.up: column, *.out: row(heads=8)`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from polytempo.partition.tensor.builders import built
from polytempo.partition.tensor.layers.dropout import CheckedDropout
from polytempo.partition.tensor.layers.layer import Cutter, SplitLayer
from polytempo.partition.tensor.model_group import ModelGroup
from polytempo.partition.tensor.split_model import SplitModel
from polytempo.partition.tensor.way import Way, column, places, row, way_of

Rules = Mapping[str, Way | str]
"""Names of modules, or patterns with `*`, to ways: `{"*.mlp.up": "column", "*.mlp.down": "row"}`."""

_OF_SEQUENCES = ("sequence", "scatter")


def matched(model: nn.Module, rules: Rules) -> dict[str, Way]:
    """The way of each layer that a rule names, in the model's order.

    Errors: ValueError for a name that fits no layer (with the nearest), for a layer that two rules split differently,
    and for a layer inside of another.
    """
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    found: dict[str, tuple[Way, str]] = {}
    for pattern, asked in rules.items():
        way, fitting = way_of(asked), [name for name in names if fnmatchcase(name, pattern)]
        if not fitting:
            if not names:
                raise ValueError(
                    f"no layer of the model has a name, for it is a single {type(model).__name__}; give "
                    f'nn.Sequential(model), with the layer "0"'
                )
            near = _nearest(pattern, names)
            meant = f" (did you mean {near!r}?)" if near else ""
            raise ValueError(f"the model has no layer {pattern!r}{meant}; it has {', '.join(names[:12])}")
        for name in fitting:
            before, rule = found.setdefault(name, (way, pattern))
            if before != way:
                raise ValueError(
                    f"layer {name} is split by {before} after {rule!r}, and by {way} after {pattern!r}; drop one"
                )
    for name in found:
        inside = next((other for other in found if other.startswith(f"{name}.")), None)
        if inside is not None:
            raise ValueError(f"{inside} is inside of {name}, which is split as a whole; drop one of the two rules")
    return {name: found[name][0] for name in names if name in found}


def _nearest(pattern: str, names: Sequence[str]) -> str | None:
    """The name most like a pattern; for a pattern with `*`, the first name with a like last part."""
    by_last = {name.rpartition(".")[2]: name for name in reversed(names)}
    whole = get_close_matches(pattern, names, n=1)
    last = get_close_matches(pattern.rpartition(".")[2], by_last, n=1)
    return whole[0] if whole else by_last[last[0]] if last else None


def apply_rules(model: nn.Module, rules: Rules, group: ModelGroup) -> SplitModel:
    """Keep this rank's parts of the layers of `model`. The answer takes its place, and changes its modules."""
    ways = matched(model, rules)
    wrong = [name for name, way in ways.items() if way.kind in _OF_SEQUENCES and not group.sequence]
    if wrong:
        raise ValueError(f"{wrong[0]} is split by {ways[wrong[0]]}, which is for sequence=True; give that to split")
    cutter = Cutter(group)
    made: dict[int, nn.Module] = {}
    for name, way in ways.items():
        module = model.get_submodule(name)
        if id(module) not in made:
            made[id(module)] = built(cutter, name, module, way)
    _check_tied(model, ways, cutter)
    _check_grids(ways)
    if group.sequence:
        _check_all_named(model, ways)
    for name, layer in [(name, made[id(model.get_submodule(name))]) for name in ways]:
        replace_module(model, name, layer)
    _watch_dropouts(model, group)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # a way around its layers
    return SplitModel(model, group, ways)


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put `module` in the place of the layer of this name."""
    owner, _, field = name.rpartition(".")
    module.training = model.get_submodule(name).training
    if isinstance(module, SplitLayer):
        module.shown = module.shown or name
    setattr(model.get_submodule(owner), field, module)


def _inside(name: str, ways: Mapping[str, Way]) -> bool:
    return any(name == other or name.startswith(f"{other}.") for other in ways)


def _check_tied(model: nn.Module, ways: Mapping[str, Way], cutter: Cutter) -> None:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in cutter.made and not _inside(name.rpartition(".")[0], ways):
            first = cutter.made[id(parameter)][3]
            raise ValueError(
                f"{name} and {first} are one tied parameter, and only {first} is split; split both layers, for example "
                'the embedding by "embedding" and the output layer by "vocabulary"'
            )


def _check_grids(ways: Mapping[str, Way]) -> None:
    """Check that pictures are cut alike wherever they are: layers hand them to each other."""
    grids = {way: name for name, way in ways.items() if way.kind == "places"}
    if len(grids) > 1:
        first, other, *_ = grids
        raise ValueError(
            f"{grids[first]} is split by {first}, and {grids[other]} by {other}; a model's pictures are cut in one grid"
        )


def _check_all_named(model: nn.Module, ways: Mapping[str, Way]) -> None:
    """Check that all layers are named: others would get a part of the positions, and a part of the gradient."""
    for name, module in model.named_modules():
        holds = any(True for _ in module.parameters(recurse=False)) or (isinstance(module, nn.Dropout) and module.p)
        if holds and not _inside(name, ways):
            raise ValueError(
                f"with sequence=True every layer with parameters or dropout needs a rule, and {name or 'the model'} "
                f'({type(module).__name__}) has none; norms and dropouts between split layers are "sequence", a '
                'layer before the first of them is "scatter"'
            )


def _watch_dropouts(model: nn.Module, group: ModelGroup) -> None:
    """Let dropouts that no rule names check that they are the same on all ranks."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Dropout) and module.p and not isinstance(module, SplitLayer):
            replace_module(model, name, CheckedDropout(group, module, name))


EXAMPLE = 'rules are a dictionary such as {"*.up": "column", "*.down": "row"}'
_RULE = re.compile(r"\s*([^\s,:]+)\s*:\s*(\w+)\s*(?:\(([^()]*)\))?\s*(?:,|$)")
_OPTION = re.compile(r"(heads|packed|gather|rows|columns)\s*=\s*(\d{1,6}|[Tt]rue|[Ff]alse)")


def rules_of(given: Rules | str) -> dict[str, Way]:
    """Rules from a text or a mapping. Errors: ValueError for anything else, and for no rule at all."""
    if isinstance(given, str):
        found = _parsed(given)
    elif isinstance(given, Mapping):
        found = {pattern: way_of(way) for pattern, way in given.items()}
    else:
        raise ValueError(f"{EXAMPLE}, not {given!r}")
    if not found:
        raise ValueError('no rule says which layers are split; give some, such as {"*.up": "column", "*.down": "row"}')
    return found


def rule_text(rules: Mapping[str, Way]) -> str:
    """The text that `rules_of` reads again. ValueError for a pattern that a text cannot hold."""
    odd = next((pattern for pattern in rules if not re.fullmatch(r"[^\s,:]+", pattern)), None)
    if odd is not None:
        raise ValueError(f"pattern {odd!r} of a rule has a space, a comma or a colon, which no layer's name has")
    return ", ".join(f"{pattern}: {way}" for pattern, way in rules.items())


def _parsed(text: str) -> dict[str, Way]:
    found: dict[str, Way] = {}
    at = 0
    while at < len(text.rstrip()):
        match = _RULE.match(text, at)
        if match is None:
            raise ValueError(
                f"{text[at:].strip()!r} cannot be read; rules are written '*.up: column, *.out: row(heads=8)': a "
                "layer's name or a pattern, a colon, a way"
            )
        if match[1] in found:
            raise ValueError(f"the rules have {match[1]!r} twice; drop one")
        found[match[1]] = _way(match[2], match[3])
        at = match.end()
    return found


def _way(name: str, options: str | None) -> Way:
    if options is None:
        return way_of(name)
    given: dict[str, int | bool] = {}
    for each in options.split(",") if options.strip() else []:
        match = _OPTION.fullmatch(each.strip())
        if match is None:
            raise ValueError(
                f"{each.strip()!r} is not an option of a way; there are heads=8, packed=3, gather=True, rows=2 and "
                "columns=2"
            )
        given[match[1]] = int(match[2]) if match[2].isdigit() else match[2].lower() == "true"
    makers: dict[str, Callable[..., Way]] = {"column": column, "row": row, "places": places}
    if name not in makers:
        raise ValueError(f"the way {name!r} has no options; write {name!r} alone")
    try:
        return makers[name](**given)
    except TypeError:
        raise ValueError(
            "row has the option heads alone, column heads, packed and gather, places rows and columns; got " + options
        ) from None
