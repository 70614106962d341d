"""Softmax, norms and attention."""

import torch
import torch.nn.functional as F

from tests.torch.shard.tables.entries import (
    X, Entry, bools, entry)


Q = (2, 4, 5, 3)

NORMALIZATION: list[Entry] = [
    entry("softmax", lambda a: a.softmax(-1), X),
    entry("softmax 0", lambda a: torch.softmax(a, 0), X),
    entry("softmax kw", lambda a: F.softmax(a, dim=1), X),
    entry("softmax dtype", lambda a: F.softmax(a, dim=1, dtype=torch.float32), X),
    entry("log_softmax", lambda a: F.log_softmax(a, -1), X),
    entry("softmin", lambda a: F.softmin(a, dim=0), X),
    entry("layer_norm", lambda a: F.layer_norm(a, (7,)), X),
    entry("layer_norm weight", lambda a, w, b: F.layer_norm(a, (7,), w, b), X, (7,), (7,)),
    entry("layer_norm no bias", lambda a, w: F.layer_norm(a, (7,), w), X, (7,)),
    entry("layer_norm kw", lambda a, w, b: F.layer_norm(
        a, normalized_shape=[3, 7], bias=b, weight=w, eps=1e-3), (5, 3, 7), (3, 7), (3, 7)),
    entry("layer_norm 3-d", lambda a, w, b: F.layer_norm(a, (7,), w, b), (2, 5, 7), (7,), (7,)),
    entry("rms_norm", lambda a, w: F.rms_norm(a, (7,), w), X, (7,)),
    entry("rms_norm plain", lambda a: F.rms_norm(a, (7,), eps=1e-5), X),
    entry("group_norm", lambda a, w, b: F.group_norm(a, 2, w, b), (3, 4, 5), (4,), (4,)),
    entry("batch_norm", lambda a, w, b: F.batch_norm(a, None, None, w, b, training=True), (5, 4),
          (4,), (4,)),
    entry("instance_norm", F.instance_norm, (2, 3, 5)),
    entry("F.normalize", F.normalize, X),
    entry("F.normalize dim", lambda a: F.normalize(a, p=1, dim=0), X),
    entry("F.cosine_similarity", F.cosine_similarity, X, X),
    entry("F.pairwise_distance", F.pairwise_distance, X, X),
    entry("dropout eval", lambda a: F.dropout(a, 0.5, training=False), X),
    entry("dropout 0", lambda a: F.dropout(a, 0.0), X),
    entry("sdpa", F.scaled_dot_product_attention, Q, Q, Q),
    entry("sdpa causal", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
          Q, Q, Q),
    entry("sdpa cross", F.scaled_dot_product_attention, Q, (2, 4, 7, 3), (2, 4, 7, 6)),
    entry("sdpa scale", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.3),
          Q, Q, Q),
    entry("sdpa 3-d", F.scaled_dot_product_attention, (4, 5, 3), (4, 5, 3), (4, 5, 3)),
    entry("sdpa 2-d", F.scaled_dot_product_attention, (5, 3), (5, 3), (5, 3)),
    entry("sdpa bool mask", lambda q, k, v, m: F.scaled_dot_product_attention(
        q, k, v, m | torch.eye(5).bool()), Q, Q, Q, bools(5, 5)),
    entry("sdpa mask", lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
          Q, Q, Q, (5, 5)),
    entry("sdpa mask 4-d", F.scaled_dot_product_attention,
          Q, Q, Q, (2, 1, 5, 5)),
    entry("sdpa gqa", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
          Q, (2, 2, 5, 3), (2, 2, 5, 3)),
    entry("sdpa gqa causal", lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True), (2, 8, 5, 3), (2, 2, 5, 3), (2, 2, 5, 3)),
]
