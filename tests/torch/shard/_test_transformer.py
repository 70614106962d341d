"""A small transformer with random placements equals the dense one, loss and every gradient."""
from functools import partial

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, seed, settings, strategies as st

from hyper_parallel import Partial, Replicate, Shard, init_device_mesh
from tests.torch.against_dense import Failures, difference, spread

NPROC = 4
TIMEOUT = 120
VOCABULARY, HIDDEN, HEADS, INNER, BATCH, LENGTH = 13, 8, 4, 12, 3, 5
SHAPES = {
    "embedding": (VOCABULARY, HIDDEN), "position": (LENGTH, HIDDEN), "norm1": (HIDDEN,),
    "norm1_bias": (HIDDEN,), "qkv": (3 * HIDDEN, HIDDEN), "qkv_bias": (3 * HIDDEN,),
    "out": (HIDDEN, HIDDEN), "out_bias": (HIDDEN,), "norm2": (HIDDEN,), "norm2_bias": (HIDDEN,),
    "up": (INNER, HIDDEN), "up_bias": (INNER,), "gate": (INNER, HIDDEN), "down": (HIDDEN, INNER),
    "down_bias": (HIDDEN,), "norm3": (HIDDEN,), "head": (VOCABULARY, HIDDEN),
}
# What a norm may be made of in between, to see that every op takes every layout.
BETWEEN = ("embedded", "attended", "hidden", "logits")


def _attention(x, p, causal):
    q, k, v = F.linear(x, p["qkv"], p["qkv_bias"]).chunk(3, dim=-1)
    q, k, v = (t.view(BATCH, LENGTH, HEADS, -1).transpose(1, 2) for t in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return F.linear(mixed.transpose(1, 2).reshape(BATCH, LENGTH, HIDDEN), p["out"], p["out_bias"])


def _by_hand(x, p, causal):
    """Attention from its parts: einsum, mask, softmax."""
    q, k, v = (t.unflatten(-1, (HEADS, -1)) for t in F.linear(x, p["qkv"], p["qkv_bias"]).split(
        HIDDEN, -1))
    scores = torch.einsum("blhe,bshe->bhls", q, k) / (HIDDEN // HEADS) ** 0.5
    if causal:
        later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    mixed = torch.einsum("bhls,bshe->blhe", scores.softmax(-1), v)
    return mixed.flatten(2) @ p["out"].t() + p["out_bias"]


def _loss(tokens, targets, p, form, moved):
    """``moved(name, tensor)`` may change the layout of what stands between two layers."""
    attention = _by_hand if form["by_hand"] else _attention
    x = moved("embedded", F.embedding(tokens, p["embedding"], padding_idx=form["padding"])
              + p["position"])
    x = x + attention(F.layer_norm(x, (HIDDEN,), p["norm1"], p["norm1_bias"]), p, form["causal"])
    x = moved("attended", x)
    y = F.layer_norm(x, (HIDDEN,), p["norm2"], p["norm2_bias"])
    if form["gated"]:
        inner = F.silu(F.linear(y, p["gate"])) * F.linear(y, p["up"])
    else:
        inner = F.gelu(F.linear(y, p["up"], p["up_bias"]))
    x = moved("hidden", x + F.linear(inner, p["down"], p["down_bias"]))
    x = F.rms_norm(x, (HIDDEN,), p["norm3"], eps=1e-6)
    weight = p["embedding"] if form["tied"] else p["head"]
    logits = moved("logits", F.linear(x, weight))
    loss = F.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1), ignore_index=2,
                           label_smoothing=0.1 if form["smooth"] else 0.0)
    return loss + 0.01 * logits.pow(2).mean() if form["penalty"] else loss


@st.composite
def _placements(draw, shape, axes, summands):
    kinds = [Replicate(), *map(Shard, range(len(shape))), *([Partial()] if summands else [])]
    return [draw(st.sampled_from(kinds)) for _ in range(axes)]


@st.composite
def _examples(draw, axes):
    batch = (BATCH, LENGTH)
    return {
        "tokens": draw(_placements(batch, axes, False)),
        "targets": draw(_placements(batch, axes, False)),
        "parameters": {name: draw(_placements(shape, axes, True))
                       for name, shape in SHAPES.items()},
        "between": {name: draw(st.none() | _placements((BATCH, LENGTH, HIDDEN), axes, False))
                    for name in BETWEEN},
        "form": {name: draw(st.booleans()) for name in (
            "by_hand", "causal", "gated", "tied", "smooth", "penalty")}
        | {"padding": draw(st.sampled_from([None, 1, -2]))},
    }


def _dense_tensors():
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
    targets = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
    parameters = {name: (torch.randn(shape, dtype=torch.float64, generator=generator) / 2
                         ).requires_grad_() for name, shape in SHAPES.items()}
    return tokens, targets, parameters


def _check(mesh, example):
    tokens, targets, dense = _dense_tensors()
    wanted = _loss(tokens, targets, dense, example["form"], lambda name, x: x)
    wanted.backward()
    parameters = {name: spread(tensor, mesh, example["parameters"][name], seed=index)
                  for index, (name, tensor) in enumerate(dense.items())}

    def moved(name, x):
        placements = example["between"][name]
        return x if placements is None else x.redistribute(placements=placements)

    loss = _loss(spread(tokens, mesh, example["tokens"]), spread(targets, mesh, example["targets"]),
                 parameters, example["form"], moved)
    loss.backward()
    texts = {"loss": difference(loss.full_tensor().detach(), wanted.detach())}
    for name, tensor in dense.items():
        if tensor.grad is not None:
            texts[name] = difference(parameters[name].grad.full_tensor(), tensor.grad)
    wrong = {name: text for name, text in texts.items() if text}
    assert not wrong, wrong


def _property(mesh, count):
    """Every rank draws the same examples first: a failing run must not be repeated by one alone."""
    examples = []

    def collect(example):
        examples.append(example)

    drawing = settings(max_examples=count, deadline=None, database=None, phases=[Phase.generate],
                       suppress_health_check=list(HealthCheck))
    seed(20)(drawing(given(_examples(mesh.ndim))(collect)))()
    assert len(examples) == count
    failures = Failures()
    for example in examples:
        failures.run(partial(_check, mesh, example), str(mesh.mesh_shape), str(example))
    failures.report()


def test_on_two_ranks():
    _property(init_device_mesh((2, 2), ("dp", "tp"))["tp"], 30)


def test_on_four_ranks():
    _property(init_device_mesh((4,), ("x",)), 15)


def test_on_two_axes():
    _property(init_device_mesh((2, 2), ("dp", "tp")), 30)
