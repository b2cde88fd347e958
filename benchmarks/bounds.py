"""The least work of the model's own layers: multiplications (or numbers read), relative to one plain model.

Frozen work on rows that are alike over members is counted once, up to query, key and value of the first random layer. A
layer's projections, attention products, the head and the members' own work are counted; norms, softmax, rotary
embeddings and everything elementwise are not.
"""

from __future__ import annotations

from benchmarks.models import RANK, WHERE, Subject


def prefill(subject: Subject, where: str, num_members: int, length: int, *, heads: int) -> float:
    """Multiplications of a forward over rows of ``length``, of which ``heads`` positions go through the head.

    The last layer's feed-forward is needed at these positions, too; "one plain model" runs it at all.
    """
    layers, own = subject.fields["num_hidden_layers"], num_members
    layer = length * (_layer(subject) + _attention(subject, length))
    head = heads * _head(subject)
    extra = length * _lora(subject)
    shared = (own - 1) * length * _projections(subject)
    unread = own * (length - heads) * _feed_forward(subject)
    single = layers * layer + head
    if where == WHERE[0]:
        return (own * (layers * (layer + extra) + head) - shared - unread) / single
    return ((layers - 1) * layer + own * (layer + extra + head) - shared - unread) / single


def training(subject: Subject, where: str, num_members: int, *, cached: bool = False) -> float:
    """Multiplications of a chain-step with a shared minibatch over a single step's; ``cached``: without the trunk.

    The gradient of a module's input costs as much as its forward, that of its weight again; the trunk needs neither,
    and the first random layer's query, key and value no gradient of their input.
    """
    if where == WHERE[0]:
        return 1.0
    layer, projections = _layer(subject), _projections(subject)
    trunk = (subject.fields["num_hidden_layers"] - 1) * layer
    ours = 0 if cached else trunk
    if where == WHERE[2]:
        own = 3 * layer - projections + 2 * _head(subject)
        return (ours / num_members + own) / (trunk + own)
    own = 2 * (layer - projections) + 2 * _head(subject)
    return ((ours + projections) / num_members + own) / (trunk + projections + own)


def decode(subject: Subject, where: str, num_members: int, length: int) -> float:
    """Numbers read for one token after ``length``: the base's weights once, the members' own and keys M times."""
    layers, keys = subject.fields["num_hidden_layers"], 2 * length * _key_width(subject)
    single = single_read(subject, length)
    fanned = layers if where == WHERE[0] else 1
    own = _lora(subject) * num_members if where != WHERE[2] else _layer(subject) * (num_members - 1)
    return (single + fanned * ((num_members - 1) * keys + own)) / single


def single_read(subject: Subject, length: int) -> int:
    """Numbers that a plain model reads for one token after ``length``: weights, keys and values."""
    layers = subject.fields["num_hidden_layers"]
    return layers * (_layer(subject) + 2 * length * _key_width(subject)) + _head(subject)


def single_products(subject: Subject, length: int) -> int:
    """Multiplications of a plain model's forward for a position of a row of ``length``."""
    return subject.fields["num_hidden_layers"] * (_layer(subject) + _attention(subject, length)) + _head(subject)


def _layer(subject: Subject) -> int:
    """Weights of a decoder layer."""
    return _projections(subject) + subject.fields["hidden_size"] ** 2 + _feed_forward(subject)


def _feed_forward(subject: Subject) -> int:
    """Weights of gate, up and down."""
    return 3 * subject.fields["hidden_size"] * subject.fields["intermediate_size"]


def _projections(subject: Subject) -> int:
    """Weights of query, key and value."""
    return subject.fields["hidden_size"] * (subject.fields["hidden_size"] + 2 * _key_width(subject))


def _key_width(subject: Subject) -> int:
    return (
        subject.fields["hidden_size"] // subject.fields["num_attention_heads"] * subject.fields["num_key_value_heads"]
    )


def _attention(subject: Subject, length: int) -> int:
    """Products with keys and with values, of a position that sees half of the row."""
    return subject.fields["hidden_size"] * length


def _head(subject: Subject) -> int:
    return subject.fields["hidden_size"] * subject.fields["vocab_size"]


def _lora(subject: Subject) -> int:
    """Weights of the adapters on query, key, value and output of a layer."""
    hidden = subject.fields["hidden_size"]
    return RANK * (4 * hidden + 2 * (hidden + _key_width(subject)))
