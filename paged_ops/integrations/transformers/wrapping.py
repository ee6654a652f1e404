"""The changes that wrapping for paged attention makes to a model, and how they are undone."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paged_ops.integrations.transformers.few_rows import run_few_row_layer
from paged_ops.integrations.transformers.fused_layers import run_fused_layer
from paged_ops.integrations.transformers.latent import expands_step, latent_modules
from paged_ops.integrations.transformers.probe import Attending
from paged_ops.integrations.transformers.recurrent import StateLayers
from paged_ops.integrations.transformers.refusals import refuse_training
from paged_ops.integrations.transformers.state_steps import StepStates

NAME = "paged_ops"  # the attention implementation
UNDO = "undo the wrapping by PagedCausalLM.unwrap()"


class LayerCaches(NamedTuple):
    """The caches of one decoder layer, whose compiled code does not depend on the layer index."""

    caches: tuple[Tensor, ...]


class StepCache:
    """The caches and the batch of a step, in place of transformers' cache: for models that pass nothing else to their
    attention. To the model's masks it is empty: all tokens of the step are new."""

    def __init__(self, kv_caches: Any, metadata: Any) -> None:
        self.kv_caches, self.metadata = kv_caches, metadata

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0


class Wrapping:
    """Records the changes to one model, and undoes them."""

    def __init__(self, model: Any) -> None:
        self.model = model
        configs = {id(each.config): each.config for each in model.modules() if hasattr(each, "config")}
        self._implementations = [(config, config._attn_implementation) for config in configs.values()]
        self.attending: dict[nn.Module, Attending] = {}
        self.configs: tuple[Any, ...] = ()
        self._is_armed = False
        self._states: StateLayers | None = None
        self._replaced: list[tuple[nn.Module, str, nn.Module]] = []
        self._forwards: list[tuple[nn.Module, Any]] = []
        self._compiled: list[tuple[nn.Module, dict[str, Any]]] = []
        self._attributes: list[tuple[nn.Module, str, Any]] = []
        self._types: list[tuple[nn.Module, type]] = []
        model.paged_wrapping = self

    def set_implementation(self, name: str) -> None:
        # like model.set_attn_implementation, without its warnings about configs without a model
        for config, _ in self._implementations:
            config._attn_implementation_internal = name

    def leave_others(self) -> None:
        """Let modules outside of the decoder, such as those of a vision tower, attend as before."""
        names = {module: name for name, module in self.model.named_modules()}
        paths = [names[module] for module in self.attending]
        within = [m for m, name in names.items() if any(f"{path}.".startswith(f"{name}.") for path in paths)]
        used = {id(module.config) for module in (self.model, *within) if hasattr(module, "config")}
        for config, implementation in self._implementations:
            if id(config) not in used:
                config._attn_implementation_internal = implementation

    def replace(self, parent: nn.Module, name: str, module: nn.Module) -> None:
        self._replaced.append((parent, name, getattr(parent, name)))
        setattr(parent, name, module)

    def set_attribute(self, module: nn.Module, name: str, value: Any) -> None:
        self._attributes.append((module, name, vars(module).get(name)))
        setattr(module, name, value)

    def retype(self, module: nn.Module, kind: type) -> None:
        """Change its class to a subclass."""
        self._types.append((module, type(module)))
        module.__class__ = kind

    def replace_forward(self, layer: nn.Module, forward: Callable[..., Any]) -> None:
        self._forwards.append((layer, layer.__dict__.get("forward")))
        layer.forward = forward

    def compile(self, module: nn.Module, **options: Any) -> None:
        self._compiled.append((module, options))
        module.compile(**options)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy, whose modules torch leaves uncompiled."""
        self.__dict__.update(state)
        for module, options in self._compiled:
            module.compile(**options)

    def note(self, module: Any, attending: Attending) -> None:
        self.attending[module] = module.paged_attending = attending

    def keep_states(self, states: StateLayers) -> None:
        self._states = states
        states.install()

    def arm(self) -> None:
        """Record how the model attends now: this must not change any more."""
        configs = {id(config): config for config in (getattr(m, "config", self.model.config) for m in self.attending)}
        self.configs, self._is_armed = tuple(configs.values()), True
        for parent, name, _ in self._replaced:
            getattr(parent, name).armed = True

    def check(self) -> None:
        if not self._is_armed:
            raise ValueError(
                "model: expected one that is wrapped, got one after unwrap(), or after it was wrapped again by another"
                " PagedCausalLM: use that one, or wrap it again"
            )
        refuse_training(self.model, self.model.training)
        for config in self.configs:
            if config._attn_implementation != NAME:
                raise ValueError(
                    f'model: expected one that attends through "{NAME}", as when it was wrapped, got'
                    f' "{config._attn_implementation}"; wrap it by PagedCausalLM again, or {UNDO}'
                )

    def place_of(self, module: nn.Module) -> tuple[nn.Module, nn.Module]:
        """For a module that attends: the module with the list of decoder layers, and its decoder layer."""
        names = {each: name for name, each in self.model.named_modules()}
        path = names[module].split(".")
        for end in range(1, len(path)):
            layers = self.model.get_submodule(".".join(path[:end]))
            if isinstance(layers, nn.ModuleList):
                parent = self.model.get_submodule(".".join(path[: end - 1]))
                return parent, self.model.get_submodule(".".join(path[: end + 1]))
        raise ValueError(
            f"model: expected every layer with attention in a list of layers, got {names[module]} in"
            f" {type(self.model).__name__}; compile the whole step instead (GenerationLoop's compile)"
        )

    def undo(self) -> None:
        for layer, forward in reversed(self._forwards):
            del layer.forward
            if forward is not None:
                layer.forward = forward
        for module, _ in self._compiled:
            module._compiled_call_impl = None
        for parent, name, module in reversed(self._replaced):
            setattr(parent, name, module.to(self.model.device))
        for module, name, value in reversed(self._attributes):
            delattr(module, name) if value is None else setattr(module, name, value)
        for module, kind in self._types:
            module.__class__ = kind
        for module in self.attending:
            if getattr(module, "paged_attending", None) is not None:
                del module.paged_attending
        if self._states is not None:
            self._states.remove()
        self.attending, self.configs, self._is_armed, self._states = {}, (), False, None
        self._forwards, self._compiled, self._replaced, self._attributes, self._types = [], [], [], [], []
        if getattr(self.model, "paged_wrapping", None) is self:
            del self.model.paged_wrapping
            for config, implementation in self._implementations:
                config._attn_implementation_internal = implementation


class CompiledLayer:
    """The forward of one decoder layer, by compiled code that all layers of its kind share. Steps whose latents are
    expanded run eagerly."""

    def __init__(
        self, run_layer: Callable[..., Any], layer: nn.Module, caches: list[int], states: list[int], latent: bool
    ) -> None:
        self.run_layer, self.layer, self.caches, self.states = run_layer, layer, caches, states
        self.latent = next(latent_modules(layer), None) if latent else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.caches:
            carried = next(((name, each) for name, each in kwargs.items() if isinstance(each, StepCache)), None)
            kv_caches = kwargs.get("kv_caches") if carried is None else carried[1].kv_caches
            if kv_caches is None:
                raise ValueError(f"model: its layers are compiled for paged attention; {UNDO}")
            of_layer = LayerCaches(tuple(kv_caches[i] for i in self.caches))
            if carried is None:
                kwargs["kv_caches"] = of_layer
            else:
                kwargs[carried[0]] = StepCache(of_layer, carried[1].metadata)
        else:
            kwargs.pop("kv_caches", None)
        if self.states:
            argument, step = next((each for each in kwargs.items() if isinstance(each[1], StepStates)), (None, None))
            if argument is None or step is None:
                raise ValueError(f"model: its layers are compiled for paged steps; {UNDO}")
            kwargs[argument] = step.of_layer([step.groups[i] for i in self.states])
            if not step.is_decode:
                return run_layer(self.layer, args, kwargs)
        if getattr(self.layer, "paged_fusion", None) is not None and isinstance(args[0], Tensor):
            layer: Any = self.layer  # the first layer: give it the pair that all others get
            args = (args[0], layer.input_layernorm(args[0])), *args[1:]
        is_eager = self.latent is not None and expands_step(kwargs["attention_metadata"], self.latent)
        return (run_layer if is_eager else self.run_layer)(self.layer, args, kwargs)


def run_layer(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # Does not read the layer index: each layer would then be compiled separately.
    if getattr(layer, "paged_fusion", None) is not None:
        return run_fused_layer(layer, *args, **kwargs)
    if getattr(layer, "paged_few_rows", None) is not None:
        return run_few_row_layer(layer, *args, **kwargs)
    return type(layer).forward(layer, *args, **kwargs)


class CompiledRun:
    """:func:`run_layer`, compiled for the layers of one kind; a copy compiles it anew."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        # torch limits recompiles per code object, so the function has its own code
        code = run_layer.__code__.replace()
        own: Any = types.FunctionType(code, run_layer.__globals__, run_layer.__name__)
        self.run = torch.compile(own, **options)

    def __call__(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.run(layer, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return CompiledRun, (self.options,)
