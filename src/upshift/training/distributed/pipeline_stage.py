"""Make one pipeline stage of an unmodified model: keep its modules, and run them alone in the model's own forward pass.

A stage is the whole model with some of its layers. Modules before the layers stay in the first stage, modules after them in
the last. Both are found by running the model once, on a few tokens, with one of its layers. Names of weights are the whole
model's. In later stages the first layer gets the hidden states that were received, in place of those that the model's forward
pass made of nothing. In all but the last stage the forward pass ends after the last layer.

Find out whether a model comes apart between any two of its layers, and which modules stand before and after them.

The model runs once, on a few tokens, with one of its layers. Only hidden states may depend on earlier weights and go from
layer to layer.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from upshift.errors import JobFailed, RequestError
from upshift.internals.torch_names import CHILDREN, tree_leaves
from upshift.models.adapter import base_of
from upshift.models.build import find_stacks
from upshift.models.tracing.segments import fake_masks
from upshift.planning.layout import divisors
from upshift.planning.plan import Plan
from upshift.training.distributed.mesh import Mesh

ROWS, WIDTH = 3, 7  # of the tokens that it runs on: a dimension that is one of them, or their product, grows with it
INSTEAD = "use fully_shard=weights, or tensor_parallel, in place of pipeline_parallel"


@dataclass
class ModelSplit:
    """The paths of modules that have weights ``before`` the layers, with the shape of each output, and ``after`` them."""

    stack: str
    before: dict[str, Callable[[int, int], tuple[int, ...]]] = field(default_factory=dict)
    after: list[str] = field(default_factory=list)
    hidden_shape: Callable[[int, int], tuple[int, ...]] = lambda rows, width: (rows, width)

    def tied(self, model: nn.Module) -> list[nn.Parameter]:
        """Return weights that modules before and after the layers share, in the order of the model."""
        after = {id(parameter) for path in self.after for parameter in model.get_submodule(path).parameters()}
        before = [parameter for path in self.before for parameter in model.get_submodule(path).parameters()]
        return [parameter for parameter in before if id(parameter) in after]


def find_split(model: nn.Module) -> ModelSplit:
    """Return the parts of a model with one stack of layers. Raise RequestError if it does not come apart."""
    ((stack, layers),) = find_stacks(model)
    parts = ModelSplit(stack)
    siblings = _modules_beside_stack(model, stack)
    outputs: dict[str, Any] = {}
    called: list[str] = []  # paths in their order, the stack among them

    def record(path: str, module: nn.Module, args: Any, output: Any) -> None:
        called.append(path)
        outputs[path] = output

    hooks = [module.register_forward_hook(partial(record, path)) for path, module in siblings.items()]
    try:
        with _run_first_layer_alone(model, stack, layers, called) as hidden:
            _run(model)
    finally:
        for hook in hooks:
            hook.remove()
    parts.hidden_shape = _shape_function(hidden[0], "its layers", stack)
    start = called.index(stack)
    for path in siblings:
        if path in called[:start] and path in called[start:]:
            raise RequestError(f"the model's {path} is needed before and after its layers; {INSTEAD}")
        if path in called[:start]:
            parts.before[path] = _shape_function(outputs[path], path, stack)
        else:
            parts.after.append(path)
    return parts


def _modules_beside_stack(model: nn.Module, stack: str) -> dict[str, nn.Module]:
    """Return modules with weights beside the stack and beside the modules that hold it, by path."""
    found: dict[str, nn.Module] = {}
    path = ""
    module = model
    for name in stack.split("."):
        own = [name for name, _ in module.named_parameters(recurse=False)]
        if own:
            raise RequestError(f"the model has weights outside of its modules ({', '.join(own)}); {INSTEAD}")
        for other, child in module.named_children():
            if other != name and any(True for _ in child.parameters()):
                found[f"{path}{other}"] = child
        path = f"{path}{name}."
        module = module.get_submodule(name)
    return found


@contextmanager
def _run_first_layer_alone(
    model: nn.Module, stack: str, layers: nn.ModuleList, called: list[str]
) -> Iterator[list[torch.Tensor]]:
    """Run the first layer while open, and return its output from every other layer. Yield the list that its input will be put
    into."""
    hidden: list[torch.Tensor] = []
    returned: list[Any] = []

    def run(number: int, layer: nn.Module, whole: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else kwargs.get("hidden_states")
        others = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor) and one is not given]
        if not isinstance(given, torch.Tensor) or any(one.requires_grad for one in others):
            raise RequestError(
                f"the layers of {stack} take more from what comes before them than hidden states, "
                f"so they cannot run in other processes; {INSTEAD}"
            )
        called.append(stack)
        if not returned:
            hidden.append(given)
            returned.append(whole(*args, **kwargs))
        return returned[0]

    for number, layer in enumerate(layers):
        layer.forward = partial(run, number, layer, layer.forward)
    try:
        yield hidden
    finally:
        for layer in layers:
            del layer.forward


def _run(model: nn.Module) -> None:
    device = next(model.parameters()).device
    ids = torch.zeros((ROWS, WIDTH), dtype=torch.long, device=device)
    extra = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    devices = [device] if device.type == "cuda" else []
    masks = fake_masks(masked=False) if device.type == "meta" else nullcontext()  # on the meta device their values cannot be read
    with torch.random.fork_rng(devices=devices), torch.enable_grad(), masks:
        model(input_ids=ids, labels=ids, **extra)


def _shape_function(made: Any, what: str, stack: str) -> Callable[[int, int], tuple[int, ...]]:
    """Return a function for the shape of ``made`` with any number of rows and tokens a row."""
    if not isinstance(made, torch.Tensor):
        raise RequestError(f"{what} makes more than one tensor for {stack}; {INSTEAD}")
    dimensions = tuple(made.shape)

    def of(rows: int, width: int) -> tuple[int, ...]:
        grows = {ROWS: rows, WIDTH: width, ROWS * WIDTH: rows * width}
        return tuple(grows.get(dimension, dimension) for dimension in dimensions)

    return of


Shape = Callable[[int, int], tuple[int, ...]]  # of hidden states, from rows and tokens a row


class StageEnd(Exception):
    """The last layer of a stage has run. The rest of the forward pass belongs to another stage."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


class StageLayers(nn.ModuleList):
    """Layers of one stage under their numbers in the whole model. While a stage runs, they are in wrappers around hidden
    states."""

    is_stack = True  # of one layer too

    def __init__(self, layers: dict[str, nn.Module]) -> None:
        super().__init__()
        self._modules.update(layers)
        self.wrap: Callable[[int, nn.Module], Any] | None = None

    def _shown(self) -> list[Any]:
        layers = list(self._modules.values())
        return layers if self.wrap is None else [self.wrap(number, layer) for number, layer in enumerate(layers)]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._shown())

    def __getitem__(self, index: Any) -> Any:
        return self._shown()[index]


class SlicedConfig:
    """A config whose lists of one entry a layer are cut down to those of some layers."""

    def __init__(self, whole: Any, lists: dict[str, Any]) -> None:
        self.__dict__.update(lists, whole=whole)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__dict__["whole"], name)


class FirstStagePlaceholder(nn.Module):
    """A stand-in for a module of the first stage. It returns zeros of the shape that the module made."""

    stage: Stage

    def __init__(self, shape: Shape, stage: Stage) -> None:
        super().__init__()
        self.shape: Shape = shape
        self.__dict__["stage"] = stage  # no child: it holds the model

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        received = self.stage.received
        assert received is not None
        return received.new_zeros(()).expand(self.shape(*self.stage.rows_and_width))


@dataclass(frozen=True)
class LayerInStage:
    """A layer as the model's forward pass meets it in a running stage."""

    layer: nn.Module
    stage: Stage
    is_first: bool
    is_last: bool

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_first:
            args, kwargs = self.stage.enter(args, kwargs)
        output = self.layer(*args, **kwargs)
        if self.is_last:
            raise StageEnd(output if isinstance(output, torch.Tensor) else output[0])
        return output


class Stage:
    """One of ``count`` stages, and the hidden states for its next forward pass."""

    def __init__(self, model: nn.Module, parts: ModelSplit, index: int, count: int, group: dist.ProcessGroup) -> None:
        self.index = index
        self.count = count
        self.group = group
        self.hidden_shape = parts.hidden_shape
        self.is_first = index == 0
        self.is_last = index == count - 1
        self.received: torch.Tensor | None = None
        self.rows_and_width: tuple[int, int] = (0, 0)
        tied = parts.tied(model)
        self._forward = model.forward
        self._layers = self._cut(model, parts)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.shared = [names[id(weight)] for weight in tied if id(weight) in names]  # in the first and the last stage

    def _cut(self, model: nn.Module, parts: ModelSplit) -> StageLayers:
        parent_path, _, name = parts.stack.rpartition(".")
        parent = model.get_submodule(parent_path)
        whole: nn.ModuleList = getattr(parent, name)
        each = len(whole) // self.count
        first = self.index * each
        last = (self.index + 1) * each
        for path in parts.after if not self.is_last else ():
            _replace(model, path, None)
        for path, shape in parts.before.items() if not self.is_first else ():
            _replace(model, path, FirstStagePlaceholder(shape, self))
        layers = StageLayers({str(number): whole[number] for number in range(first, last)})
        setattr(parent, name, layers)
        config = getattr(parent, "config", None)
        if config is not None:
            lists = {
                key: value[first:last]
                for key, value in vars(config).items()
                if isinstance(value, list) and len(value) == len(whole)
            }
            parent.config = SlicedConfig(config, lists)  # type: ignore[assignment]
        return layers

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the first layer's arguments, with the hidden states that were received."""
        received = self.received
        self.received = None
        return ((received, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": received})

    def forward(self, **inputs: Any) -> Any:
        """Return the model's own output in the last stage, and hidden states in all others."""
        last = len(self._layers) - 1
        self.rows_and_width = tuple(inputs["input_ids"].shape)
        self._layers.wrap = lambda number, layer: LayerInStage(
            layer, self, is_first=number == 0 and not self.is_first, is_last=number == last and not self.is_last
        )
        try:
            output = self._forward(**inputs)
        except StageEnd as end:
            output = end.hidden
        finally:
            self._layers.wrap = None
        if self.received is not None or (not self.is_last and not isinstance(output, torch.Tensor)):
            raise JobFailed(f"pipeline stage {self.index}: the model left out a layer; use fully_shard=weights")
        return output


class Stages(nn.ModuleList):
    """The stages of a rank that has several. Names of weights are the whole model's, after the number of the stage."""


def cut_stage(model: nn.Module, mesh: Mesh) -> nn.Module:
    """Return the rank's stage of ``model``, cut out in place, or its ``Stages``, or the whole model if there is no pipeline.

    Each has its ``Stage`` as ``pipeline_stage``. Raise RequestError for a model that does not come apart.
    """
    layout = mesh.plan.layout
    ranks = layout.pipeline_parallel
    if mesh.device_mesh is None or ranks == 1:
        return model
    parts = find_split(_runnable_model(model))
    group = mesh.device_mesh.get_group("pipeline")
    count = ranks * layout.virtual_stages
    own = range(mesh.stage, count, ranks)
    if len(own) == 1:
        return bind_stage(model, Stage(model, parts, mesh.stage, count, group))
    alike = [_copy_path(model, parts.stack) for _ in own]
    return Stages([bind_stage(one, Stage(one, parts, index, count, group)) for one, index in zip(alike, own, strict=True)])


def _runnable_model(model: Any) -> Any:
    """Return the model itself. If its weights are not read yet, return the same model with its buffers on the meta device too."""
    if not next(model.parameters()).is_meta:
        return model
    with torch.device("meta"):
        return type(model)(model.config)


def stage_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules of ``model`` that run as models of their own: each stage of a rank, or all of it."""
    return list(model) if isinstance(model, Stages) else [model]


def layers_per_stage(layers: int, modules: list[nn.Module]) -> list[int]:
    """Return how many of the first ``layers`` layers fall to each of these stages. A rank has its share, in its first stages."""
    stages = [getattr(module, "pipeline_stage", None) for module in modules]
    if stages[0] is None:
        return [layers]
    each = stages[0].num_layers
    count = stages[0].count
    left = -(-layers * len(modules) // count)
    found = []
    for _ in modules:
        found.append(min(left, each))
        left -= found[-1]
    return found


def why_not_pipeline_parallel(model: nn.Module, plan: Plan) -> str | None:
    """Return why the model's layers cannot be shared by depth as the plan says, and the next best, or None.

    These reasons are known without running the model.
    """
    layout = plan.layout
    if layout.pipeline_parallel == 1:
        return None
    asked = f"pipeline_parallel={layout.pipeline_parallel}"
    instead = "use fully_shard=weights, or tensor_parallel"
    stacks = find_stacks(model)
    if len(stacks) != 1:
        paths = ", ".join(path for path, _ in stacks) or "none"
        return f"{asked} divides one stack of layers, and the model has {len(stacks)} ({paths}); {instead}"
    layers = len(stacks[0][1])
    count = layout.pipeline_parallel * layout.virtual_stages
    if layers % count:
        each = f" with virtual_stages={layout.virtual_stages}" if layout.virtual_stages > 1 else ""
        valid = ", ".join(str(degree) for degree in divisors(layers) if degree > 1)
        return f"{asked}{each} does not divide {layers} layers; stages times ranks can be {valid}"
    if getattr(base_of(model).config.get_text_config(), "output_router_logits", False):
        return f"{asked}: the loss of the model's router (output_router_logits) is taken over all layers; {instead}"
    if getattr(base_of(model).config.get_text_config(), "layerdrop", 0.0):
        return f"{asked}: the model leaves out layers at random (layerdrop), each stage others; set it to 0, or {instead}"
    if plan.torch_compile == "model":
        return f"{asked} runs a part of the model's forward pass, which torch_compile=model makes one; use torch_compile=layer"
    return None


def bind_stage(model: nn.Module, stage: Stage) -> nn.Module:
    """Return ``model``, which was cut to ``stage``, set up to run as this stage."""
    model.forward = functools.update_wrapper(functools.partial(stage.forward), model.forward)
    model.pipeline_stage = stage  # type: ignore[assignment]
    return model


def _replace(model: nn.Module, path: str, module: nn.Module | None) -> None:
    parent_path, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent_path), name, module)


def _copy_path(model: nn.Module, path: str) -> nn.Module:
    """Return a copy of the modules from ``model`` down to ``path``, whose other children are the same."""
    own = copy.copy(model)
    own.__dict__.update({key: copy.copy(value) for key, value in vars(model).items() if isinstance(value, dict)})
    name, _, rest = path.partition(".")
    if rest:
        CHILDREN.of(own)[name] = _copy_path(model.get_submodule(name), rest)
    return own
