"""Cut an unmodified model into pipeline stages, and run one stage in the model's own forward pass.

``find_split`` finds out whether a model can be cut between any two layers, and which modules come before and after them. It runs
the model once, on a few tokens, with one of its layers. Only hidden states may depend on earlier weights and go from layer to
layer.

A ``Stage`` is the whole model with some of its layers. Modules before the layers stay in the first stage, modules after them in
the last. Weights keep their names. In later stages the first layer gets the hidden states that were received, in place of those
that the forward pass makes from placeholders. In all but the last stage the forward pass ends after the last layer.
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

# Size of the batch for the trial run. A dimension of this size, or of the product, grows with the batch.
ROWS = 3
WIDTH = 7
INSTEAD = "use fully_shard=weights, or tensor_parallel, in place of pipeline_parallel"
Shape = Callable[[int, int], tuple[int, ...]]  # the shape of hidden states for a number of rows and of tokens in a row


@dataclass
class ModelSplit:
    """The paths of the modules with weights that run before and after the layers of a model."""

    stack: str  # path of the list of layers
    before: dict[str, Shape] = field(default_factory=dict)  # with the shape of each module's output
    after: list[str] = field(default_factory=list)
    hidden_shape: Shape = lambda rows, width: (rows, width)

    def tied(self, model: nn.Module) -> list[nn.Parameter]:
        """Return the weights that modules before and after the layers share, in the order of the model."""
        ids_after = {id(parameter) for path in self.after for parameter in model.get_submodule(path).parameters()}
        before = [parameter for path in self.before for parameter in model.get_submodule(path).parameters()]
        return [parameter for parameter in before if id(parameter) in ids_after]


def find_split(model: nn.Module) -> ModelSplit:
    """Return how a model with one stack of layers can be cut. Raise RequestError if it cannot."""
    ((stack, layers),) = find_stacks(model)
    split = ModelSplit(stack)
    siblings = _modules_beside_stack(model, stack)
    outputs: dict[str, Any] = {}
    called: list[str] = []  # paths in the order of their calls, the stack among them

    def record(path: str, module: nn.Module, args: Any, output: Any) -> None:
        called.append(path)
        outputs[path] = output

    hooks = [module.register_forward_hook(partial(record, path)) for path, module in siblings.items()]
    try:
        with _run_first_layer_alone(model, stack, layers, called) as hidden:
            _run_once(model)
    finally:
        for hook in hooks:
            hook.remove()
    split.hidden_shape = _shape_function(hidden[0], "its layers", stack)
    start = called.index(stack)
    for path in siblings:
        if path in called[:start] and path in called[start:]:
            raise RequestError(f"the model's {path} is needed before and after its layers; {INSTEAD}")
        if path in called[:start]:
            split.before[path] = _shape_function(outputs[path], path, stack)
        else:
            split.after.append(path)
    return split


def _modules_beside_stack(model: nn.Module, stack: str) -> dict[str, nn.Module]:
    """Return the modules with weights beside the stack, and beside the modules that hold it, by path."""
    modules: dict[str, nn.Module] = {}
    path = ""
    module = model
    for name in stack.split("."):
        direct_weights = [name for name, _ in module.named_parameters(recurse=False)]
        if direct_weights:
            raise RequestError(f"the model has weights outside of its modules ({', '.join(direct_weights)}); {INSTEAD}")
        for other, child in module.named_children():
            if other != name and any(True for _ in child.parameters()):
                modules[f"{path}{other}"] = child
        path = f"{path}{name}."
        module = module.get_submodule(name)
    return modules


@contextmanager
def _run_first_layer_alone(
    model: nn.Module, stack: str, layers: nn.ModuleList, called: list[str]
) -> Iterator[list[torch.Tensor]]:
    """Run only the first layer while open, and let every other layer return its output.

    Yield a list to which the first layer's input is added.
    """
    hidden: list[torch.Tensor] = []
    returned: list[Any] = []

    def run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        states = args[0] if args else kwargs.get("hidden_states")
        other_tensors = [
            value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor) and value is not states
        ]
        if not isinstance(states, torch.Tensor) or any(tensor.requires_grad for tensor in other_tensors):
            raise RequestError(
                f"the layers of {stack} take more from what comes before them than hidden states, "
                f"so they cannot run in other processes; {INSTEAD}"
            )
        called.append(stack)
        if not returned:
            hidden.append(states)
            returned.append(forward(*args, **kwargs))
        return returned[0]

    for layer in layers:
        layer.forward = partial(run, layer.forward)
    try:
        yield hidden
    finally:
        for layer in layers:
            del layer.forward


def _run_once(model: nn.Module) -> None:
    """Run the model's forward pass on a few tokens."""
    device = next(model.parameters()).device
    ids = torch.zeros((ROWS, WIDTH), dtype=torch.long, device=device)
    extra = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    devices = [device] if device.type == "cuda" else []
    # On the meta device the values of masks cannot be read.
    masks = fake_masks(masked=False) if device.type == "meta" else nullcontext()
    with torch.random.fork_rng(devices=devices), torch.enable_grad(), masks:
        model(input_ids=ids, labels=ids, **extra)


def _shape_function(output: Any, producer: str, stack: str) -> Shape:
    """Return a function for the shape that ``output`` has with any number of rows and of tokens in a row."""
    if not isinstance(output, torch.Tensor):
        raise RequestError(f"{producer} makes more than one tensor for {stack}; {INSTEAD}")
    dimensions = tuple(output.shape)

    def shape(rows: int, width: int) -> tuple[int, ...]:
        new_sizes = {ROWS: rows, WIDTH: width, ROWS * WIDTH: rows * width}
        return tuple(new_sizes.get(dimension, dimension) for dimension in dimensions)

    return shape


class StageEnd(Exception):
    """Raised after the last layer of a stage: the rest of the forward pass belongs to another stage."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


class StageLayers(nn.ModuleList):
    """The layers of one stage, by their numbers in the whole model. While a stage runs, each is in a wrapper."""

    is_stack = True  # a list of one layer counts too

    def __init__(self, layers: dict[str, nn.Module]) -> None:
        super().__init__()
        self._modules.update(layers)
        self.wrap: Callable[[int, nn.Module], Any] | None = None

    def _wrapped_layers(self) -> list[Any]:
        layers = list(self._modules.values())
        if self.wrap is None:
            return layers
        return [self.wrap(number, layer) for number, layer in enumerate(layers)]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._wrapped_layers())

    def __getitem__(self, index: Any) -> Any:
        return self._wrapped_layers()[index]


class SlicedConfig:
    """A config whose lists with one entry for each layer have only the entries of some layers."""

    def __init__(self, full_config: Any, lists: dict[str, Any]) -> None:
        self.__dict__.update(lists, full_config=full_config)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__dict__["full_config"], name)


class FirstStagePlaceholder(nn.Module):
    """A stand-in for a module of the first stage. It returns zeros in the shape of the module's output."""

    stage: Stage

    def __init__(self, shape: Shape, stage: Stage) -> None:
        super().__init__()
        self.shape: Shape = shape
        self.__dict__["stage"] = stage  # not as a child module: the stage holds the model

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        received = self.stage.received
        assert received is not None
        return received.new_zeros(()).expand(self.shape(*self.stage.rows_and_width))


@dataclass(frozen=True)
class LayerInStage:
    """A layer as the model's forward pass calls it in a running stage."""

    layer: nn.Module
    stage: Stage
    is_first: bool
    is_last: bool

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_first:
            args, kwargs = self.stage.insert_received(args, kwargs)
        output = self.layer(*args, **kwargs)
        if self.is_last:
            raise StageEnd(output if isinstance(output, torch.Tensor) else output[0])
        return output


class Stage:
    """One of ``count`` stages of a model. ``received`` has the hidden states for its next forward pass."""

    def __init__(self, model: nn.Module, split: ModelSplit, index: int, count: int, group: dist.ProcessGroup) -> None:
        self.index = index
        self.count = count
        self.group = group
        self.hidden_shape = split.hidden_shape
        self.is_first = index == 0
        self.is_last = index == count - 1
        self.received: torch.Tensor | None = None
        self.rows_and_width: tuple[int, int] = (0, 0)
        tied = split.tied(model)
        self._forward = model.forward
        self._layers = self._cut(model, split)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        # Weights that are in the first and in the last stage.
        self.tied_names = [names[id(weight)] for weight in tied if id(weight) in names]

    def _cut(self, model: nn.Module, split: ModelSplit) -> StageLayers:
        """Remove from the model, in place, what other stages run. Return the stage's layers."""
        parent_path, _, name = split.stack.rpartition(".")
        parent = model.get_submodule(parent_path)
        all_layers: nn.ModuleList = getattr(parent, name)
        stage_size = len(all_layers) // self.count
        first = self.index * stage_size
        end = (self.index + 1) * stage_size
        if not self.is_last:
            for path in split.after:
                _replace(model, path, None)
        if not self.is_first:
            for path, shape in split.before.items():
                _replace(model, path, FirstStagePlaceholder(shape, self))
        layers = StageLayers({str(number): all_layers[number] for number in range(first, end)})
        setattr(parent, name, layers)
        config = getattr(parent, "config", None)
        if config is not None:
            lists = {
                key: value[first:end]
                for key, value in vars(config).items()
                if isinstance(value, list) and len(value) == len(all_layers)
            }
            parent.config = SlicedConfig(config, lists)  # type: ignore[assignment]
        return layers

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def insert_received(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the first layer's arguments, with the hidden states that were received."""
        received = self.received
        self.received = None
        if args:
            return (received, *args[1:]), kwargs
        return args, kwargs | {"hidden_states": received}

    def forward(self, **inputs: Any) -> Any:
        """Return the model's own output in the last stage, and hidden states in all others."""
        last = len(self._layers) - 1
        self.rows_and_width = tuple(inputs["input_ids"].shape)
        self._layers.wrap = lambda number, layer: LayerInStage(
            layer, self, is_first=number == 0 and not self.is_first, is_last=number == last and not self.is_last
        )
        try:
            output = self._forward(**inputs)
        except StageEnd as stage_end:
            output = stage_end.hidden
        finally:
            self._layers.wrap = None
        if self.received is not None or (not self.is_last and not isinstance(output, torch.Tensor)):
            raise JobFailed(f"pipeline stage {self.index}: the model left out a layer; use fully_shard=weights")
        return output


class Stages(nn.ModuleList):
    """The stages of a rank that has several. A weight's name is the number of the stage and the name in the whole model."""


def cut_stage(model: nn.Module, mesh: Mesh) -> nn.Module:
    """Return the rank's stage of ``model``, cut in place, or its ``Stages``, or the whole model if there is no pipeline.

    The ``Stage`` of each module is its attribute ``pipeline_stage``. Raise RequestError for a model that cannot be cut.
    """
    layout = mesh.plan.layout
    ranks = layout.pipeline_parallel
    if mesh.device_mesh is None or ranks == 1:
        return model
    split = find_split(_runnable_model(model))
    group = mesh.device_mesh.get_group("pipeline")
    count = ranks * layout.virtual_stages
    indices = range(mesh.stage, count, ranks)
    if len(indices) == 1:
        return bind_stage(model, Stage(model, split, mesh.stage, count, group))
    copies = [_copy_path(model, split.stack) for _ in indices]
    stages = []
    for copy_of_model, index in zip(copies, indices, strict=True):
        stages.append(bind_stage(copy_of_model, Stage(copy_of_model, split, index, count, group)))
    return Stages(stages)


def _runnable_model(model: Any) -> Any:
    """Return the model, or, if its weights are not loaded yet, a new one whose buffers are on the meta device too."""
    if not next(model.parameters()).is_meta:
        return model
    with torch.device("meta"):
        return type(model)(model.config)


def stage_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that run as models: the stages of a rank that has several, or the model itself."""
    return list(model) if isinstance(model, Stages) else [model]


def layers_per_stage(layers: int, modules: list[nn.Module]) -> list[int]:
    """Return how many of ``layers`` layers fall to each of the rank's stages. A rank takes its share in its first stages."""
    stages = [getattr(module, "pipeline_stage", None) for module in modules]
    if stages[0] is None:
        return [layers]
    stage_size = stages[0].num_layers
    remaining = -(-layers * len(modules) // stages[0].count)
    counts = []
    for _ in modules:
        counts.append(min(remaining, stage_size))
        remaining -= counts[-1]
    return counts


def why_not_pipeline_parallel(model: nn.Module, plan: Plan) -> str | None:
    """Return why pipeline stages cannot share the model's layers and what to use instead, or None if they can.

    These checks do not run the model.
    """
    layout = plan.layout
    if layout.pipeline_parallel == 1:
        return None
    setting = f"pipeline_parallel={layout.pipeline_parallel}"
    instead = "use fully_shard=weights, or tensor_parallel"
    stacks = find_stacks(model)
    if len(stacks) != 1:
        paths = ", ".join(path for path, _ in stacks) or "none"
        return f"{setting} divides one stack of layers, and the model has {len(stacks)} ({paths}); {instead}"
    layers = len(stacks[0][1])
    count = layout.pipeline_parallel * layout.virtual_stages
    if layers % count:
        stages_setting = f" with virtual_stages={layout.virtual_stages}" if layout.virtual_stages > 1 else ""
        valid = ", ".join(str(degree) for degree in divisors(layers) if degree > 1)
        return f"{setting}{stages_setting} does not divide {layers} layers; stages times ranks can be {valid}"
    if getattr(base_of(model).config.get_text_config(), "output_router_logits", False):
        return f"{setting}: the loss of the model's router (output_router_logits) is taken over all layers; {instead}"
    return None


def bind_stage(model: nn.Module, stage: Stage) -> nn.Module:
    """Make ``model``, which was cut to ``stage``, run as this stage, and return it."""
    model.forward = functools.update_wrapper(functools.partial(stage.forward), model.forward)
    model.pipeline_stage = stage  # type: ignore[assignment]
    return model


def _replace(model: nn.Module, path: str, module: nn.Module | None) -> None:
    parent_path, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent_path), name, module)


def _copy_path(model: nn.Module, path: str) -> nn.Module:
    """Copy the modules from ``model`` down to ``path``. The copies share all other children with ``model``."""
    copied = copy.copy(model)
    copied.__dict__.update({key: copy.copy(value) for key, value in vars(model).items() if isinstance(value, dict)})
    name, _, rest = path.partition(".")
    if rest:
        CHILDREN.of(copied)[name] = _copy_path(model.get_submodule(name), rest)
    return copied
