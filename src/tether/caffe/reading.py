"""Net and solver files: parsed by protobuf, in Caffe's present syntax, filtered by phase, stage and level."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tether.caffe.schema import V0_NAMES, V0_TRANSFORMS, V0_TYPES, V1_TYPES, enum_name, message
from tether.errors import UsageError, unknown

#: larger text files are no definitions of nets
TEXT_BYTES_MAX = 64 << 20
#: fields of a V1 layer that mean the same in a layer of today
_SAME = ("name", "bottom", "top", "loss_weight", "include", "exclude", "blobs")


@dataclass(frozen=True)
class NetFile:
    """A net in today's syntax, and where it was read."""

    net: Any
    path: Path
    #: the line that each of its layers begins at; 0: not known
    lines: tuple[int, ...]

    def where(self, index: int) -> str:
        """A layer as errors name it."""
        layer = self.net.layer[index]
        line = f":{self.lines[index]}" if self.lines[index] else ""
        return f"{self.path}{line}: layer {layer.name or index!r} ({layer.type or 'without a type'})"


@dataclass(frozen=True)
class State:
    """What decides which layers of a file are part of a net."""

    phase: str
    level: int = 0
    stages: frozenset[str] = field(default_factory=frozenset)


@dataclass(frozen=True)
class SolverFile:
    """A solver with its nets."""

    solver: Any
    path: Path
    train: tuple[NetFile, State]
    tests: tuple[tuple[NetFile, State], ...]


def find_file(name: str, near: Path) -> Path | None:
    """A file or folder that a definition names: from the working directory, as Caffe does, or from the file's folder.

    Files of Caffe's examples name each other from the root of Caffe, so the folders above the file are tried too.
    """
    path = Path(name).expanduser()
    folder = near.absolute().parent
    candidates = [path] if path.is_absolute() else [Path.cwd() / path, *(p / path for p in (folder, *folder.parents))]
    try:
        return next((c for c in [*candidates, folder / path.name] if name and c.exists()), None)
    except (OSError, ValueError):  # such as a name with a zero byte or one that is too long
        return None


def read_net(path: Path) -> NetFile:
    """A net from a text file."""
    text = _text(path)
    net = message("NetParameter")
    try:
        _parse(text, net, path)
    except UsageError as error:
        if _is("SolverParameter", text):
            raise UsageError(f"{path} is a solver, and not a net: name the net, which its field net names") from None
        raise error
    return upgraded(net, path, _layer_lines(text).get((), []))


def read_solver(path: Path) -> SolverFile:
    """A solver and the nets that it names or holds."""
    text = _text(path)
    solver = message("SolverParameter")
    try:
        _parse(text, solver, path)
    except UsageError as error:
        if _is("NetParameter", text):
            raise UsageError(
                f"{path} is a net, and not a solver: name the solver file, whose field net names this one; 'tether "
                f"caffe summary {path}' shows the net"
            ) from None
        raise error
    lines = _layer_lines(text)
    _upgrade_solver(solver, path)

    def embedded(name: str, net: Any, index: int = 0) -> NetFile:
        return upgraded(net, path, lines.get((name, index), []))

    def named(name: str) -> NetFile:
        if (found := find_file(name, path)) is None:
            raise UsageError(
                f"{path} names the net {name!r}, which is neither below the working directory nor near that file: "
                "correct the name, or start from the folder that it is relative to"
            )
        return read_net(found)

    generic = embedded("net_param", solver.net_param) if solver.HasField("net_param") else None
    generic = named(solver.net) if generic is None and solver.HasField("net") else generic
    given = [solver.HasField(name) for name in ("net", "net_param", "train_net", "train_net_param")]
    if sum(given) != 1:
        what = "several of" if sum(given) else "none of"
        raise UsageError(f"{path} has {what} net, net_param, train_net and train_net_param: a solver has exactly one")
    if solver.HasField("train_net_param"):
        train = embedded("train_net_param", solver.train_net_param)
    elif solver.HasField("train_net"):
        train = named(solver.train_net)
    else:
        assert generic is not None
        train = generic
    tests = [embedded("test_net_param", net, index) for index, net in enumerate(solver.test_net_param)]
    tests += [named(name) for name in solver.test_net]
    count = len(solver.test_iter)
    if generic is None and count != len(tests):
        raise UsageError(f"{path} has {len(tests)} test nets and {count} test_iter: give each test net a test_iter")
    if count < len(tests):
        raise UsageError(f"{path} has {len(tests)} test nets but {count} test_iter: give each test net a test_iter")
    if generic is not None:
        tests += [generic] * (count - len(tests))
    if len(solver.test_state) not in (0, len(tests)):
        raise UsageError(f"{path} has {len(solver.test_state)} test_state for {len(tests)} test nets: give none or all")
    states = list(solver.test_state) or [None] * len(tests)
    return SolverFile(
        solver,
        path,
        (train, state_of(train.net, "TRAIN", solver.train_state if solver.HasField("train_state") else None)),
        tuple((net, state_of(net.net, "TEST", state)) for net, state in zip(tests, states, strict=True)),
    )


def state_of(net: Any, phase: str, more: Any = None, stages: tuple[str, ...] = (), level: int = 0) -> State:
    """The state of a net in a phase: what the net says itself, and then what the solver or the caller says."""
    state = message("NetState")
    state.phase = {"TRAIN": 0, "TEST": 1}[phase]
    state.level = level
    state.stage.extend(stages)
    state.MergeFrom(net.state)
    if more is not None:
        state.MergeFrom(more)
    return State(enum_name("Phase", state.phase), state.level, frozenset(state.stage))


def included(source: NetFile, state: State) -> Iterator[int]:
    """The layers of a net in this state, by their numbers."""
    for index, layer in enumerate(source.net.layer):
        if layer.include and layer.exclude:
            raise UsageError(f"{source.where(index)} has include and exclude rules: give rules of one kind only")
        if layer.include:
            if any(_meets(state, rule) for rule in layer.include):
                yield index
        elif not any(_meets(state, rule) for rule in layer.exclude):
            yield index


def _meets(state: State, rule: Any) -> bool:
    return not (
        (rule.HasField("phase") and enum_name("Phase", rule.phase) != state.phase)
        or (rule.HasField("min_level") and state.level < rule.min_level)
        or (rule.HasField("max_level") and state.level > rule.max_level)
        or not set(rule.stage) <= state.stages
        or set(rule.not_stage) & state.stages
    )


# ---- parsing --------------------------------------------------------------------------------------------------------


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > TEXT_BYTES_MAX:
            raise UsageError(f"{path} is too large for a text file of Caffe: name a .prototxt file")
        content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None
    if b"\0" in content:
        raise UsageError(f"{path} is not a text file: name a .prototxt file")
    try:
        return content.decode()
    except UnicodeDecodeError:
        return content.decode("latin-1")  # comments may be in any encoding


def _parse(text: str, into: Any, path: Path) -> None:
    from google.protobuf import text_format

    try:
        _text_to_message(text, into)
    except text_format.ParseError as error:
        line, column = error.GetLine(), error.GetColumn()
        what = str(error).partition(" : ")[2] or str(error)
        known = _fields_of(what)
        raise UsageError(
            f"{path}:{line or 1}:{column or 1}: {what.replace('tether.caffe.', '').strip()}{known}"
        ) from None
    except (ValueError, TypeError, UnicodeError) as error:
        raise UsageError(f"{path} cannot be parsed: {error}") from None


def _text_to_message(text: str, into: Any) -> None:
    from google.protobuf import text_format

    with warnings.catch_warnings():  # protobuf decodes unknown escapes with a codec that warns of them
        warnings.simplefilter("ignore", DeprecationWarning)
        text_format.Parse(text, into)


def _fields_of(error: str) -> str:
    """Which fields a message has, for an error about an unknown one."""
    if "has no field named" not in error:
        return ""
    kind = error.partition('"tether.caffe.')[2].partition('"')[0]
    wrong = error.rpartition('named "')[2].partition('"')[0]
    try:
        names = sorted(message(kind).DESCRIPTOR.fields_by_name)
    except KeyError:
        return ""
    from tether.errors import guess

    shown = f" It has {', '.join(names)}." if len(names) <= 30 else ""
    return f"{shown}{guess(wrong, names)}"


def _is(kind: str, text: str) -> bool:
    from google.protobuf import text_format

    try:
        _text_to_message(text, message(kind))
    except (text_format.ParseError, ValueError, TypeError):
        return False
    return True


def _layer_lines(text: str) -> dict[tuple[Any, ...], list[int]]:
    """The lines at which layers begin: of the file itself, (), and of nets in a solver, (field, number)."""
    from google.protobuf import text_format

    tokens = text_format.Tokenizer(text.splitlines(), skip_comments=True)
    found: dict[tuple[Any, ...], list[int]] = {}
    stack: list[tuple[str, int]] = []
    counts: dict[str, int] = {}
    name, line = "", 0
    while not tokens.AtEnd():
        token = tokens.token
        if token in ("{", "<"):
            if name in ("layer", "layers") and len(stack) <= 1:
                parent = (stack[0][0], stack[0][1]) if stack else ()
                found.setdefault(parent, []).append(line)
            if not stack:
                counts[name] = counts.get(name, -1) + 1
            stack.append((name, counts.get(name, 0)))
        elif token in ("}", ">") and stack:
            stack.pop()
        elif token.isidentifier():
            name, line = token, tokens._line + 1
        try:
            tokens.NextToken()
        except text_format.ParseError:
            return {}
    return found


# ---- older syntax ---------------------------------------------------------------------------------------------------


def upgraded(net: Any, path: Path, lines: list[int]) -> NetFile:
    """The net in today's syntax: from `layers` with numbered types, and from inputs that are no layers."""
    if net.layers and net.layer:
        raise UsageError(f"{path} has both 'layer' and 'layers': write all layers in one syntax")
    new = message("NetParameter")
    new.CopyFrom(net)
    makers: dict[str, Any] = {}
    kept = []
    for index, old in enumerate(net.layers):
        at = f"{path}:{lines[index]}" if index < len(lines) else str(path)
        if not old.HasField("layer"):
            upgrade_layer(old, new.layer.add(), at)
        elif old.layer.type != "padding":
            upgrade_oldest_layer(old, new.layer.add(), makers, at)
        else:
            makers.update(dict.fromkeys(old.top, old))
            continue
        makers.update(dict.fromkeys(old.top))
        kept.append(lines[index] if index < len(lines) else 0)
    lines = kept if net.layers else lines
    del new.layers[:]
    known = lines if len(lines) == len(new.layer) else [0] * len(new.layer)
    if net.input:
        _inputs_as_layer(new, path)
        known = [0, *known]
    return NetFile(new, path, tuple(known))


def upgrade_layer(old: Any, new: Any, at: str) -> None:
    """Write a layer of the first syntax into one of the second."""
    kind = enum_name("LayerType", old.type)
    if kind not in V1_TYPES:
        raise UsageError(
            f"{at}: layer {old.name!r} has the type {kind}, which no version of Caffe has: write one of "
            f"{', '.join(sorted(V1_TYPES))}"
        )
    new.type = V1_TYPES[kind]
    for name, value in _set_fields(old).items():
        if name in _SAME or name.endswith("_param"):
            target = getattr(new, name)
            if name == "name":
                new.name = value
            elif hasattr(target, "extend"):
                target.extend(value)
            else:
                target.CopyFrom(value)
    for index in range(max(len(old.param), len(old.blob_share_mode), len(old.blobs_lr), len(old.weight_decay))):
        spec = new.param.add()
        if index < len(old.param) and old.param[index]:
            spec.name = old.param[index]
        if index < len(old.blob_share_mode):
            spec.share_mode = old.blob_share_mode[index]
        if index < len(old.blobs_lr):
            spec.lr_mult = old.blobs_lr[index]
        if index < len(old.weight_decay):
            spec.decay_mult = old.weight_decay[index]
    for name in ("data_param", "image_data_param", "window_data_param"):
        if old.HasField(name):
            legacy = getattr(old, name)
            for setting in ("scale", "mean_file", "crop_size", "mirror"):
                if legacy.HasField(setting):
                    setattr(new.transform_param, setting, getattr(legacy, setting))


def upgrade_oldest_layer(old: Any, new: Any, makers: Mapping[str, Any], at: str) -> None:
    """Write a layer of the oldest syntax (V0) into one of today's. `makers`: padding layers by what they make.

    There, a layer has its settings in one flat message, and padding is a layer of its own. Settings that do not belong
    to a layer's type are left out, as Caffe does it.
    """
    settings = old.layer
    if settings.type not in V0_TYPES:
        raise UsageError(f"{at}: layer {settings.name!r}: {unknown('type', settings.type, V0_TYPES)}")
    new.type, message_name = V0_TYPES[settings.type]
    new.name = settings.name
    new.bottom.extend(old.bottom)
    new.top.extend(old.top)
    new.blobs.extend(settings.blobs)
    target = getattr(new, message_name) if message_name else None
    given = _set_fields(settings)
    for name, value in given.items():
        field = V0_NAMES.get(name, name)
        if name in V0_TRANSFORMS:
            setattr(new.transform_param, V0_TRANSFORMS[name], value)
        elif target is not None and field in target.DESCRIPTOR.fields_by_name:
            _assign(target, field, value)
    for place, bottom in enumerate(old.bottom):
        padding = makers.get(bottom)
        if padding is None:
            continue
        if settings.type not in ("conv", "pool") or len(old.bottom) != 1 or len(padding.bottom) != 1:
            raise UsageError(
                f"{at}: layer {settings.name!r} takes the padding {bottom!r}: only a layer of type conv or pool with "
                "one bottom can"
            )
        new.bottom[place] = padding.bottom[0]
        target.ClearField("pad")  # type: ignore[union-attr]
        _assign(target, "pad", padding.layer.pad)
    for name, field in (("blobs_lr", "lr_mult"), ("weight_decay", "decay_mult")):
        for index, value in enumerate(given.get(name, ())):
            while len(new.param) <= index:
                new.param.add()
            setattr(new.param[index], field, value)


def _assign(target: Any, field: str, value: Any) -> None:
    current = getattr(target, field)
    if hasattr(current, "append"):
        current.append(value)
    elif hasattr(current, "CopyFrom"):
        current.CopyFrom(value)
    else:
        setattr(target, field, value)


def _set_fields(of: Any) -> Mapping[str, Any]:
    return {descriptor.name: value for descriptor, value in of.ListFields()}


def _inputs_as_layer(net: Any, path: Path) -> None:
    shapes = [list(shape.dim) for shape in net.input_shape]
    if not shapes:
        dims = list(net.input_dim)
        shapes = [dims[i : i + 4] for i in range(0, len(dims), 4)]
    if len(shapes) != len(net.input) or (not net.input_shape and len(net.input_dim) != 4 * len(net.input)):
        raise UsageError(
            f"{path} has {len(net.input)} inputs, {len(net.input_shape)} input_shape and {len(net.input_dim)} "
            "input_dim: give each input one input_shape, or four input_dim"
        )
    rest = list(net.layer)
    del net.layer[:]
    layer = net.layer.add(name="input", type="Input")
    layer.top.extend(net.input)
    for dims in shapes:
        layer.input_param.shape.add().dim.extend(dims)
    net.layer.extend(rest)
    net.ClearField("input")
    net.ClearField("input_shape")
    net.ClearField("input_dim")


def _upgrade_solver(solver: Any, path: Path) -> None:
    if not solver.HasField("solver_type"):
        return
    if solver.HasField("type"):
        raise UsageError(f"{path} has both type and solver_type: keep type")
    names = dict(zip(range(6), ("SGD", "Nesterov", "AdaGrad", "RMSProp", "AdaDelta", "Adam"), strict=True))
    solver.type = names[solver.solver_type]
    solver.ClearField("solver_type")
