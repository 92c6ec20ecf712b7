"""The config of a decoder: sizes, a mixer and a feed-forward for each layer, and the parameters, FLOPs and bytes that follow."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from hone.base.errors import SpecError
from hone.base.spec import Spec
from hone.base.table import Choice, Technique
from hone.cost.dims import LayerDims, ModelDims, Routed
from hone.model.adapters import ADAPTERS
from hone.model.adapters.base import Wrappers, wrappers
from hone.model.adapters.own_weights import OwnWeight
from hone.model.families import FAMILIES
from hone.model.feed_forwards import FEED_FORWARDS
from hone.model.linear_spec import LinearSpec, Norm, NormSpec, Parameter, ParameterSpec, Piece, Stream, Tokens
from hone.model.mixers import MIXERS

FamilyName = Literal[tuple(FAMILIES)]


@lru_cache(maxsize=1024)
def _linears(layer: LayerSpec, hidden_size: int) -> dict[str, LinearSpec]:
    """See `LayerSpec.linears`: a plan asks for those of every layer of many models, most of them equal."""
    found = {}
    for name, block in {"mixer": layer.mixer, "feed_forward": layer.feed_forward}.items():
        for one in block.linears(hidden_size):
            bare = layer.norms == "post" and one.reads == Norm(f"{name}_norm")
            found[f"{name}.{one.name}"] = replace(one, reads=Stream(name)) if bare else one
    return found


class LayerSpec(Spec):
    """One decoder layer: x + mixer(norm(x)), then x + feed_forward(norm(x)); `norms` says where norms stand."""

    mixer: Annotated[Technique, Choice(MIXERS)] = Field(description="How tokens attend to each other.")
    feed_forward: Annotated[Technique, Choice(FEED_FORWARDS)] = Field(description="Computed for each token alone.")
    norms: Literal["pre", "post", "both"] = Field(
        "pre", description="Norms before mixer and feed-forward, after them (inside the residual), or both."
    )

    def linears(self, hidden_size: int) -> dict[str, LinearSpec]:
        """Its linears by their path in the layer ('mixer.qkv'), the mixer's first."""
        return dict(_linears(self, hidden_size))

    def norm_names(self, block: str) -> list[str]:
        """The norms around a block, 'mixer' or 'feed_forward': of its input, of its output."""
        before = [f"{block}_norm"] if self.norms != "post" else []
        return before + ([f"{block}_post_norm"] if self.norms != "pre" else [])

    def parameters(self, hidden_size: int) -> dict[str, Parameter]:
        """Its norms and other parameters outside the linears, by the path of their tensor in the layer ('mixer_norm.weight')."""
        names = [*self.norm_names("mixer"), *self.norm_names("feed_forward")]
        found: dict[str, Parameter] = {norm.path: norm for norm in (NormSpec(name, hidden_size) for name in names)}
        for name, block in {"mixer": self.mixer, "feed_forward": self.feed_forward}.items():
            found |= {f"{name}.{one.path}": one for one in block.parameters(hidden_size)}
        return found

    def local(self, num_ranks: int) -> Self:
        """The layer of one of `num_ranks` tensor-parallel ranks (see `BlockSpec.local`)."""
        parts = {"mixer": self.mixer.local(num_ranks), "feed_forward": self.feed_forward.local(num_ranks)}
        return self.model_copy(update=parts)


class ModelConfig(Spec):
    """A decoder as data. Layers may differ from each other: a hybrid stack is a list like any other."""

    family: FamilyName = Field("llama", description="Family of checkpoints in whose format it is saved.")
    vocab_size: int = Field(gt=0, description="Tokens of the vocabulary: rows of the embedding.")
    hidden_size: int = Field(gt=0, description="Width of the residual stream.")
    layers: tuple[LayerSpec, ...] = Field(min_length=1, description="The layers, first to last.")
    norm_eps: float = Field(1e-5, gt=0, description="Added to the mean square in every RMS norm.")
    tie_embeddings: bool = Field(False, description="Whether the output head shares the embedding's weights.")
    max_seq_len: int = Field(2048, gt=0, description="Longest sequence it was trained for, in tokens.")
    bos_token_id: int | None = Field(None, description="Token a sequence begins with, if any.")
    eos_token_ids: tuple[int, ...] = Field((), description="Tokens that end a sequence.")

    norm_offset: float = Field(
        0.0,
        description="Added to the weights of all RMS norms before they multiply: 1 where checkpoints store them less 1.",
    )
    embedding_multiplier: float = Field(
        1.0, gt=0, description="Embeddings are multiplied by it, rounded to their number format."
    )
    residual_multiplier: float = Field(
        1.0, gt=0, description="Outputs of mixers and feed-forwards are multiplied by it before they are added."
    )
    logits_scaling: float = Field(1.0, gt=0, description="Logits are divided by it.")
    logits_softcap: float | None = Field(
        None, gt=0, description="Cap of the logits: softcap * tanh(logit / softcap); empty for none."
    )
    num_labels: Literal[0, 1] = Field(
        0, description="1: a reward model, whose head gives a text's score; 0: a language model, with a head of tokens."
    )

    adapters: tuple[Annotated[Technique, Choice(ADAPTERS)], ...] = Field(
        (), description="Adapters: those of the layers' linears, the first innermost, and at most one soft prompt."
    )

    @model_validator(mode="after")
    def _tokens_exist(self) -> ModelConfig:
        for token in (*self.eos_token_ids, *([] if self.bos_token_id is None else [self.bos_token_id])):
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"token {token} is outside the vocabulary of {self.vocab_size}")
        return self

    @model_validator(mode="after")
    def _scores_by_a_head(self) -> ModelConfig:
        if self.num_labels and self.tie_embeddings:
            raise ValueError("the head of a reward model scores texts: it cannot be the embedding")
        return self

    @model_validator(mode="after")
    def _shared_kv_has_a_source(self) -> ModelConfig:
        for index, layer in enumerate(self.layers):
            if not layer.mixer.reuses_kv:
                continue
            source = self.kv_source(index)
            if source is None:
                raise ValueError(f"layer {index} ('{layer.mixer.kind}') has no layer before it whose keys it could use")
            layer.mixer.check_source(self.layers[source].mixer)
        return self

    @model_validator(mode="after")
    def _adapters_have_targets(self) -> ModelConfig:
        for adapter in self.adapters:
            adapter.check(self.model_copy(update={"adapters": (adapter,)}))  # type: ignore[attr-defined]
        if sum(bool(one.prompt_parameters(self)) for one in self.adapters) > 1:  # type: ignore[attr-defined]
            raise ValueError("a model has one soft prompt at most")
        return self

    def kv_source(self, index: int) -> int | None:
        """The layer whose keys and values layer `index` attends to: the nearest before it that can share its own. None: its own."""
        if not self.layers[index].mixer.reuses_kv:
            return None
        return next((place for place in reversed(range(index)) if self.layers[place].mixer.can_share_kv), None)

    def must_predict_tokens(self, where: object) -> None:
        """Raises SpecError for a reward model, which was read from the folder `where`."""
        if self.num_labels:
            raise SpecError(
                f"{where} is a reward model, which scores texts and has no head for tokens",
                fix="give the language model that it was made from; a reward model is for rewards of kind reward_model",
            )

    def must_be_causal(self, otherwise: str) -> None:
        """Raises SpecError naming the first layer whose mixer attends to later tokens; `otherwise` ends the message."""
        for index, layer in enumerate(self.layers):
            if not layer.mixer.causal:
                raise SpecError(
                    f"layer {index} mixes with '{layer.mixer.kind}', which attends to later tokens: {otherwise}",
                    fix="take a causal mixer for every layer; `hone techniques mixer` lists them",
                )
            if not layer.feed_forward.causal:
                router = layer.feed_forward.router.kind
                raise SpecError(
                    f"layer {index} routes by '{router}', by which a token's result depends on later tokens: {otherwise}",
                    fix="take a router whose tokens choose, such as softmax; `hone techniques router` lists all",
                )

    def shares_kv(self, index: int) -> bool:
        """Whether a later layer attends to the keys and values of layer `index`."""
        return any(self.kv_source(later) == index for later in range(index + 1, self.num_layers))

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def linears(self, index: int) -> dict[str, LinearSpec]:
        """The linears of layer `index` by their path in it ('mixer.qkv')."""
        return self.layers[index].linears(self.hidden_size)

    def parameters(self, index: int) -> dict[str, Parameter]:
        """The parameters of layer `index` outside its linears, those of adapters included, by the path of their tensor."""
        found = self.layers[index].parameters(self.hidden_size)
        if self.norm_offset:
            offset = self.norm_offset
            found = {
                path: replace(one, offset=offset) if isinstance(one, NormSpec) else one for path, one in found.items()
            }
        return found | self.adapter_parameters(index)

    def adapter_parameters(self, index: int) -> dict[str, ParameterSpec]:
        """Those of `parameters` that adapters add to layer `index`."""
        found: dict[str, ParameterSpec] = {}
        for path, linear in self.linears(index).items():
            around = self.wrappers(index, path, linear)
            for depth, (adapter, pieces) in enumerate(reversed(around)):
                owner = f"{path}{'.inner' * depth}"
                found |= {f"{owner}.{one.path}": one for one in adapter.parameters(linear, pieces)}
        for adapter in self.adapters:
            found |= {one.path: one for one in adapter.layer_parameters(self)}  # type: ignore[attr-defined]
        return found

    @property
    def prompt(self) -> Any:
        """The adapter that puts a soft prompt before every document; None without one."""
        return next((one for one in self.adapters if one.prompt_parameters(self)), None)  # type: ignore[attr-defined]

    def prompt_parameters(self) -> dict[str, ParameterSpec]:
        """The parameters of the soft prompt by the path of their tensor in the decoder's `prompt`; none without one."""
        return {one.path: one for one in self.prompt.prompt_parameters(self)} if self.prompt else {}

    def token_rows(self) -> tuple[int, ...]:
        """The tokens whose rows of the embedding an adapter trains."""
        return tuple(token for one in self.adapters for token in one.token_rows(self))  # type: ignore[attr-defined]

    def own_weights(self) -> list[OwnWeight]:
        """The weights of the model itself that its adapters train."""
        return [weight for one in self.adapters for weight in one.own_weights(self)]  # type: ignore[attr-defined]

    def untrained(self, index: int) -> list[str]:
        """The parameters of layer `index` that no gradient changes, such as a router's bias, by the path of their tensor."""
        found = self.parameters(index).items()
        return [path for path, one in found if isinstance(one, ParameterSpec) and not one.trained]

    def ends(self) -> dict[str, LinearSpec]:
        """The linears outside the layers: the embedding and, unless tied to it, the head."""
        vocab, hidden = self.vocab_size, self.hidden_size
        found = {
            "embed_tokens": LinearSpec("embed_tokens", hidden, (Piece("embed_tokens", vocab),), Tokens(), "vocab"),
            "lm_head": LinearSpec(
                "lm_head", hidden, (Piece("lm_head", self.num_labels or vocab),), Norm("norm"), "vocab"
            ),
        }
        if self.tie_embeddings:
            del found["lm_head"]
        return found

    def modules(self, index: int, path: str) -> dict[str, int]:
        """The checkpoint modules of the linear at `path` of layer `index`, in order of its rows, each with its number of rows."""
        return FAMILIES[self.family].modules(index, path, self.linears(index)[path])

    def singles(self, index: int) -> dict[str, str]:
        """Tensors of layer `index` outside its linears: hone's path below the layer, and the checkpoint name."""
        family = FAMILIES[self.family]
        return {path: family.tensor(index, path) for path in self.parameters(index)}

    def wrappers(self, index: int, path: str, linear: LinearSpec) -> Wrappers:
        """The adapters around the linear at `path` of layer `index`."""
        if not self.adapters:
            return []
        return wrappers(self.adapters, linear, FAMILIES[self.family].modules(index, path, linear))

    def scoring(self) -> Self:
        """The reward model of these layers, with a head of one output."""
        return self.model_copy(update={"num_labels": 1, "tie_embeddings": False})

    def local(self, num_ranks: int) -> Self:
        """The same model with the layers of one of `num_ranks` tensor-parallel ranks; the `ends` stay whole."""
        return self.model_copy(update={"layers": tuple(layer.local(num_ranks) for layer in self.layers)})

    @property
    def num_params(self) -> int:
        """Parameters, exactly; a tied head counts once."""
        inner = sum(
            part.num_params
            for index in range(self.num_layers)
            for part in (*self.linears(index).values(), *self.parameters(index).values())
        )
        outer = (*self.ends().values(), *self.prompt_parameters().values())
        return inner + sum(part.num_params for part in outer) + self.hidden_size * (1 + len(self.token_rows()))

    @property
    def trained_params(self) -> int:
        """Parameters that a training changes: all, or those of its adapters if it has any."""
        if not self.adapters:
            return self.num_params
        own = [one for at in range(self.num_layers) for one in self.adapter_parameters(at).values()]
        own += self.prompt_parameters().values()
        beside = sum(one.num_params for one in self.own_weights()) + self.hidden_size * len(self.token_rows())
        return beside + sum(one.num_params for one in own if one.trained)

    @property
    def active_params(self) -> int:
        """Parameters used for one token: of the experts, those it is routed to."""
        linears = (one for index in range(self.num_layers) for one in self.linears(index).values())
        return self.num_params - sum(one.num_params - one.active_params for one in linears)

    def dims(self) -> ModelDims:
        """The sizes from which `hone.cost` computes estimates."""
        return ModelDims(
            num_params=self.num_params,
            active_params=self.active_params,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            max_seq_len=self.max_seq_len,
            tie_embeddings=self.tie_embeddings or bool(self.num_labels),  # one matrix of all tokens
            layers=tuple(self._layer_dims(index) for index in range(self.num_layers)),
        )

    def trained_dims(self) -> ModelDims | None:
        """The sizes of the adapters' parameters alone, which are trained then; None without adapters: all are."""
        if not self.adapters:
            return None
        own = [self.adapter_parameters(index).values() for index in range(self.num_layers)]
        products = [tuple(one for part in parts for one in part.matmuls) for parts in own]
        layers = tuple(
            replace(one, matmuls=found, matrices=found, routed=Routed())
            for one, found in zip(self.dims().layers, products, strict=True)
        )
        count = self.trained_params
        sizes = {"num_params": count, "active_params": count, "vocab_size": 0, "layers": layers}
        return replace(self.dims(), tie_embeddings=True, **sizes)

    def _layer_dims(self, index: int) -> LayerDims:
        layer = self.layers[index]
        parts = (*self.linears(index).values(), *self.parameters(index).values())
        experts = [one for one in self.linears(index).values() if one.experts is not None]
        routed = (
            Routed(sum(one.num_params for one in experts), experts[0].share, sum(len(one.matmuls) for one in experts))
            if experts
            else Routed()
        )
        return LayerDims(
            matmuls=tuple(matmul for part in parts for matmul in part.matmuls),
            mixing=layer.mixer.mixing(),
            widths=layer.mixer.widths(self.hidden_size),
            intermediate_size=layer.feed_forward.inner_size(self.hidden_size),
            cache=layer.mixer.cache(),
            matrices=tuple(one for linear in self.linears(index).values() for one in linear.matrices),
            routed_values=layer.feed_forward.routed_values(self.hidden_size),
            routed=routed,
        )

    def flops_per_token(self, seq_len: int) -> float:
        """FLOPs of one token's forward pass, averaged over a causal sequence of `seq_len` tokens.

        Convention: a multiply-add is 2 FLOPs; every matrix product including the head counts, the embedding lookup and
        elementwise work do not; mixing counts `Mixer.mixing_flops` (attention: the keys of a token, (seq_len + 1) / 2
        tokens on average, fewer with a window). A training step costs 3 times this.
        """
        return self.dims().flops_per_token(seq_len)

    def train_flops_per_token(self, seq_len: int) -> float:
        """The same of a step: 3 times, without the gradients of weights that are frozen beside adapters (4 a weight, not 6)."""
        trained, whole = self.trained_dims(), self.dims()
        frozen = 0 if trained is None else whole.matmul_params - trained.matmul_params
        return 3 * whole.flops_per_token(seq_len) - 2.0 * frozen

    def state_bytes(self, seq_len: int, bytes_per_value: float = 2) -> float:
        """Bytes of state that decoding keeps after `seq_len` tokens of a sequence, all layers."""
        return self.dims().state_values(seq_len) * bytes_per_value

    def kv_bytes_per_token(self, bytes_per_value: float = 2) -> float:
        """Bytes of one token's keys and values in the engine's pages, all layers, at `bytes_per_value` bytes a number."""
        return self.dims().kv_values_per_token * bytes_per_value
