"""The recipes gpt and gpt-10m: small GPT language models on the characters of Python's standard library.

The text comes with Python, so that nothing is downloaded, and it depends on Python's version. The metric is the loss on
validation text in nats per character.
"""

import hashlib
import math
import os
import platform
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from thinwire.errors import RecipeError
from thinwire.tools.recipes.files import read_bytes
from thinwire.tools.recipes.recipe import Batch, Defaults, Optimizer, Recipe, Splits, mean_loss, warm_up_then_cosine

VOCABULARY = 128  # the characters of ASCII; 127 stands for all others
SEPARATOR = b"\0"  # between two files
SUFFIXES = (".txt", ".py", ".md")  # of the files of a user's folder
MANY_FILES = 20  # from which a user's text is split by whole files
VALIDATION = 20  # one file in so many is for validation
LEFT_OUT = frozenset({"idle_test", "site-packages", "lib2to3"})  # folders; and all whose names begin with "test"

_ASCII = bytes.maketrans(bytes(range(128, 256)), bytes([127]) * 128)


@dataclass(frozen=True)
class TextFile:
    """A file of the text; `name` is its path below the folder, with slashes."""

    name: str
    contents: bytes

    @property
    def draw(self) -> int:
        """A number that depends only on the name, which decides the split."""
        return int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:4], "big")


def read_folder(root: Path, suffixes: tuple[str, ...], left_out: Iterable[str] = ()) -> list[TextFile]:
    """Return the files below a folder in the order of their names; files with equal contents count once."""
    skipped = frozenset(left_out)
    found = {}
    for folder, subfolders, names in os.walk(root):
        if skipped:
            subfolders[:] = [name for name in subfolders if name not in skipped and not name.startswith("test")]
        paths = (Path(folder, name) for name in names if name.endswith(suffixes))
        found.update({path.relative_to(root).as_posix(): path for path in paths})
    files: dict[bytes, TextFile] = {}
    for name, path in sorted(found.items()):
        contents = read_bytes(path)
        files.setdefault(hashlib.sha256(contents).digest(), TextFile(name, contents))
    return list(files.values())


def split_files(files: Sequence[TextFile]) -> tuple[bytes, bytes]:
    """Return the text for training and for validation; whole files belong to one of them."""
    held = [file for file in files if file.draw % VALIDATION == 0] or [min(files, key=lambda file: file.draw)]
    names = {file.name for file in held}
    return _joined(file for file in files if file.name not in names), _joined(held)


def _joined(files: Iterable[TextFile]) -> bytes:
    return SEPARATOR.join(file.contents.translate(_ASCII, b"\r") for file in files)


def read_text(data: Path | None) -> tuple[bytes, bytes]:
    """Return the text for training and for validation: the standard library, or a user's folder or file."""
    if data is None:
        return split_files(read_folder(Path(sysconfig.get_paths()["stdlib"]), (".py",), LEFT_OUT))
    if not data.exists():
        raise RecipeError(f"{data} does not exist: give a folder or a file of text, or leave out --data.")
    files = read_folder(data, SUFFIXES) if data.is_dir() else [TextFile(data.name, read_bytes(data))]
    if len(files) >= MANY_FILES:
        return split_files(files)
    text = _joined(files)
    place = len(text) - len(text) // VALIDATION
    return text[:place], text[place:]


class TextSplit:
    """Contexts that do not overlap, each with the characters that follow its own.

    They are in a fixed random order, so that the first few come from many files.
    """

    def __init__(self, text: bytes, context: int) -> None:
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._window = torch.arange(context + 1)
        count = (len(text) - 1) // context
        self._starts = context * torch.randperm(count, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self._starts)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the characters of these contexts, and at each position the next character."""
        starts = self._starts[torch.as_tensor(indices, dtype=torch.long)]
        rows = self._text[starts.unsqueeze(1) + self._window].long()
        return rows[:, :-1], rows[:, 1:]


def load(context: int, data: Path | None) -> Splits:
    """Read the text and cut it into contexts; RecipeError if a split has none."""
    train, validation = read_text(data)
    if min(len(train), len(validation)) <= context:
        where = "Python's standard library" if data is None else data
        raise RecipeError(
            f"the text of {where} has {len(train):,} characters for training and {len(validation):,} for validation, "
            f"but each needs more than {context}: give more text ({', '.join(SUFFIXES)}) with --data."
        )
    return Splits(train=TextSplit(train, context), test=TextSplit(validation, context))


class GPTBlock(nn.Module):
    """Causal self-attention and an MLP, each after a layer normalisation and beside a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the states after this block."""
        heads = self.attention_in(self.attention_norm(x)).unflatten(2, (3, self.heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).flatten(2))
        hidden = functional.gelu(self.mlp_in(self.mlp_norm(x)), approximate="tanh")
        result: Tensor = x + self.mlp_out(hidden)
        return result


class GPT(nn.Module):
    """A decoder-only Transformer with learned positions, whose embedding of characters also scores the next one."""

    def __init__(self, *, context: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(GPTBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                # Every block adds two outputs to the states; this keeps their variance independent of the depth.
                scale = 1 / math.sqrt(2 * layers) if name.endswith("_out.weight") else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, text: Tensor) -> Tensor:
        """Return the scores of the next character as (samples, characters, positions), as cross-entropy takes them."""
        x = self.characters(text) + self.positions.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.characters.weight).transpose(1, 2)


def adamw(parameters: Iterable[nn.Parameter], lr: float, momentum: float) -> Optimizer:
    """Return AdamW with the momentum as its first beta, and with weight decay on matrices only."""
    every = list(parameters)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in every if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in every if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(momentum, 0.99))


def _recipe(name: str, defaults: Defaults, *, context: int, layers: int, width: int, heads: int) -> Recipe:
    return Recipe(
        name,
        description=f"Characters of Python code with a GPT of {layers} layers and width {width}.",
        data=f"the standard library of Python {platform.python_version()}, 12 MB; no download",
        model=partial(GPT, context=context, layers=layers, width=width, heads=heads),
        load=partial(load, context),
        score=mean_loss,
        metric="loss",
        higher_is_better=False,
        make_optimizer=adamw,
        clip=1.0,
        schedule=warm_up_then_cosine,
        defaults=defaults,
    )


# Functions that return the recipes. An evaluation of so few contexts costs about as much as a few training steps.
gpt = partial(
    _recipe,
    "gpt",
    Defaults(batch=8, lr=4e-3, momentum=0.9, epochs=0.2, target=2.0, evaluate_every=50, evaluated=200),
    context=64,
    layers=4,
    width=128,
    heads=4,
)
gpt_10m = partial(
    _recipe,
    "gpt-10m",
    Defaults(batch=8, lr=1e-3, momentum=0.9, epochs=0.2, target=2.0, evaluate_every=50, evaluated=32),
    context=128,
    layers=6,
    width=384,
    heads=6,
)
