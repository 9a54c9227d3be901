"""Tokens are drawn as the settings say, from the ids that the tokenizer knows, and each row is what it would be alone."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import TINY, change, make_mesh, random_params, slow
from hypothesis import given, settings
from hypothesis import strategies as st

from minitf import checks
from minitf.data.frame import in_rows, of_tokenizer
from minitf.data.tokenizer import ByteTokenizer, CharTokenizer
from minitf.model.mlp import MlpConfig
from minitf.model.transformer import model
from minitf.params import named
from minitf.sampling import Sampler, Sampling, bucket, draw, prepared
from minitf.text import Completion, complete, prompt_ids

GREEDY = Sampling(temperature=0)
CFG = change(TINY, model__max_seq_len=64, model__pattern=("sliding", "full"), model__attention__window=5).model
PROMPTS = [np.array(ids) for ids in ([3, 1], [9, 8, 7, 6, 5], [1, 2, 3, 4, 5, 6, 7, 8, 9])]


MIXTURE = change(CFG, mlp=MlpConfig(kind="swiglu", hidden=8, router="softmax"))


@functools.cache
def made(known=None, end=None, mesh="1", cfg=CFG):
    return Sampler(cfg, make_mesh(mesh), known, () if end is None else (end,)), random_params(cfg)


def ids_of(prompts, n, sampling=GREEDY, *, known=None, end=None, mesh="1", cfg=CFG, **keywords):
    """int32 [rows, at most n] and their log-probabilities."""
    sampler, params = made(known, end, mesh, cfg)
    pieces = list(sampler.stream(params, prompts, n, sampling, **keywords))
    return (np.concatenate(parts, axis=1) for parts in zip(*pieces, strict=True))


@functools.cache
def whole_forward():
    params = random_params(CFG)
    return jax.jit(lambda ids: model(params, ids, CFG))


def by_hand(prompt, n):
    """The likeliest ids and their log-probabilities, by a whole forward pass for each."""
    ids, log_probs, forward = list(prompt), [], whole_forward()
    for _ in range(n):
        # One program for all lengths: what stands behind is not seen.
        row = np.zeros((1, 32), np.int32)
        row[0, : len(ids)] = ids
        logp = jax.nn.log_softmax(forward(row)[0, len(ids) - 1])
        ids.append(int(logp.argmax()))
        log_probs.append(float(logp.max()))
    return ids[len(prompt) :], log_probs


# ---- one token

LOGITS = jnp.log(jnp.array([[0.1, 0.05, 0.5, 0.25, 0.1]]))


def drawn(sampling, seeds=200, logits=LOGITS, seen=()):
    """The ids that different seeds draw."""
    how = {k: jnp.asarray(v, jnp.int32 if k == "top_k" else jnp.float32) for k, v in vars(sampling).items()}
    seen_BV = jnp.isin(jnp.arange(logits.shape[-1]), jnp.array(seen, int))[None]
    keys = jax.vmap(jax.random.key)(jnp.arange(seeds))
    return np.asarray(jax.vmap(lambda k: draw(logits, seen_BV, k[None], how)[0])(keys))


def test_temperature_0_is_the_likeliest_whatever_the_seed_and_the_filters():
    for s in (GREEDY, Sampling(temperature=0, top_k=0), Sampling(temperature=0, top_k=2, top_p=0.1, min_p=0.5)):
        assert set(drawn(s, 5)) == {2}


def test_top_k_0_and_above_the_vocabulary_are_off():
    everything = drawn(Sampling())
    assert set(everything) == {0, 1, 2, 3, 4}
    np.testing.assert_array_equal(drawn(Sampling(top_k=0)), everything)
    np.testing.assert_array_equal(drawn(Sampling(top_k=1000)), everything)
    np.testing.assert_array_equal(drawn(Sampling(top_k=5)), everything)


@pytest.mark.parametrize(
    ("sampling", "left"),
    [
        (Sampling(top_k=1), {2}),
        (Sampling(top_k=2), {2, 3}),
        (Sampling(top_k=3), {0, 2, 3, 4}),  # ids 0 and 4 are as likely as each other
        (Sampling(top_p=0.4), {2}),
        (Sampling(top_p=0.7), {2, 3}),
        (Sampling(top_p=0.8), {0, 2, 3, 4}),
        (Sampling(top_p=1e-6), {2}),
        (Sampling(min_p=0.4), {2, 3}),
        (Sampling(min_p=0.15), {0, 2, 3, 4}),
        (Sampling(min_p=1.0), {2}),
        (Sampling(top_k=2, top_p=0.6), {2}),  # of the two that are left, the first has two thirds
        (Sampling(top_p=0.7, temperature=4.0), {0, 2, 3, 4}),  # which flattens first
    ],
)
def test_filters_leave_the_likeliest(sampling, left):
    assert set(drawn(sampling, 400)) == left


def test_frequencies_are_the_probabilities():
    n = 4000
    for temperature in (1.0, 0.5):
        expected = np.exp(LOGITS[0] / temperature) / np.exp(LOGITS[0] / temperature).sum()
        found = np.bincount(drawn(Sampling(temperature=temperature), n), minlength=5) / n
        assert np.abs(found - expected).max() < 4 * np.sqrt(0.25 / n)


def test_the_repetition_penalty_makes_what_was_seen_less_likely_on_both_sides_of_0():
    logits = jnp.array([[2.0, 1.5, -1.0, -1.5]])
    strong = Sampling(temperature=0, repetition_penalty=2.0)
    assert set(drawn(strong, 1, logits, seen=[0])) == {1}  # 2 / 2 < 1.5
    assert set(drawn(strong, 1, logits[:, 2:], seen=[0])) == {1}  # -1 x 2 < -1.5
    assert set(drawn(GREEDY, 1, logits, seen=[0])) == {0}


@pytest.mark.parametrize(
    "wrong",
    [dict(temperature=-1.0), dict(temperature=float("nan")), dict(top_k=-1), dict(top_k=1.5), dict(top_p=0.0)]
    + [dict(top_p=1.5), dict(min_p=-0.1), dict(min_p=1.1), dict(repetition_penalty=0.0)],
)
def test_settings_that_cannot_work_are_refused(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"^--{name}={value}: must be "):
        checks.check(Sampling(**wrong), "--")


# ---- rows


def test_greedy_decoding_is_that_of_whole_forward_passes():
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 64, n) for n in [1, 5, 11, 12] * 4]
    ids, log_probs = ids_of(prompts, 12)
    for row, prompt in enumerate(prompts):
        expected = by_hand(prompt, 12)
        assert ids[row].tolist() == expected[0]
        np.testing.assert_allclose(log_probs[row], expected[1], atol=1e-5)


FILTERED = Sampling(temperature=0.7, top_k=9, repetition_penalty=1.3)


@pytest.mark.parametrize(
    ("sampling", "cfg"),
    slow([(GREEDY, CFG), (Sampling(), CFG), (FILTERED, CFG), (FILTERED, MIXTURE)], but=[(FILTERED, CFG)]),
    ids=["greedy", "drawn", "filtered", "mixture"],
)
def test_a_row_is_the_same_alone_and_among_others_in_any_order(sampling, cfg):
    together, log_probs = ids_of(PROMPTS, 6, sampling, cfg=cfg)
    backwards, _ = ids_of(PROMPTS[::-1], 6, sampling, numbers=[2, 1, 0], cfg=cfg)
    for row, prompt in enumerate(PROMPTS):
        alone, alone_log_probs = ids_of([prompt], 6, sampling, numbers=[row], cfg=cfg)
        assert together[row].tolist() == alone[0].tolist() == backwards[2 - row].tolist()
        np.testing.assert_allclose(log_probs[row], alone_log_probs[0], atol=1e-5)


def test_rows_differ_by_their_numbers_and_texts_by_their_seeds():
    same = [PROMPTS[0]] * 4
    ids, _ = ids_of(same, 12, Sampling())
    assert len({tuple(row) for row in ids.tolist()}) == 4
    assert not np.array_equal(ids, next(iter(ids_of(same, 12, Sampling(), seed=1))))
    np.testing.assert_array_equal(ids, next(iter(ids_of(same, 12, Sampling(), seed=0))))


@pytest.mark.parametrize("chunk", slow([1, 3, 16], but=[3]))
def test_the_chunk_changes_nothing(chunk):
    whole = ids_of(PROMPTS, 11, Sampling(), end=5)
    parts = ids_of(PROMPTS, 11, Sampling(), end=5, chunk=chunk)
    for a, b in zip(whole, parts, strict=True):
        n = min(a.shape[1], b.shape[1])  # what follows is -1 or nothing
        np.testing.assert_array_equal(a[:, :n], b[:, :n])
        assert (a[:, n:] <= 0).all()
        assert (b[:, n:] <= 0).all()


def test_the_first_tokens_do_not_depend_on_how_many_are_asked_for():
    few, _ = ids_of(PROMPTS, 6, Sampling())
    many, _ = ids_of(PROMPTS, 50, Sampling())
    np.testing.assert_array_equal(few, many[:, :6])


def test_more_than_the_model_tells_apart_is_refused():
    with pytest.raises(ValueError, match=r"a prompt of 9 tokens and max_new_tokens=56: 9 \+ 56 > model.max_seq_len=64"):
        ids_of(PROMPTS, 56)
    ids_of(PROMPTS, 55)


def test_prompts_that_cannot_be_read_are_refused():
    with pytest.raises(ValueError, match="a prompt without tokens"):
        ids_of([np.array([], int)], 1)
    with pytest.raises(ValueError, match="prompt 2 of 2: a prompt of 60 tokens"):
        ids_of([np.array([1]), np.ones(60, int)], 5)
    with pytest.raises(ValueError, match="a prompt with the id 64: the model has rows for 0 to 63"):
        ids_of([np.array([1, 64])], 1)


@pytest.mark.parametrize("mesh", slow(["2x2x2", "fsdp8"], but=["2x2x2"]))
def test_a_mesh_changes_nothing(mesh):
    one, one_log_probs = ids_of(PROMPTS, 10, Sampling(temperature=0.5))
    ids, log_probs = ids_of(PROMPTS, 10, Sampling(temperature=0.5), mesh=mesh)
    np.testing.assert_array_equal(ids, one)
    np.testing.assert_allclose(log_probs, one_log_probs, atol=1e-5)


@pytest.mark.parametrize(
    ("layers", "mesh"), slow([(3, "1"), (3, "2x2x2"), (4, "1"), (4, "2x2x2")], but=[(3, "2x2x2"), (4, "1")])
)
def test_layers_apart_change_nothing(layers, mesh):
    cfg = change(TINY, model__max_seq_len=64, model__pattern=("sliding", "full"), model__num_layers=layers).model
    params = random_params(cfg)
    pieces = lambda params, cfg, mesh: list(Sampler(cfg, mesh).stream(params, PROMPTS, 10, Sampling()))
    own, own_cfg = prepared(params, cfg, make_mesh(mesh))
    assert own_cfg.pattern == ("sliding", "full") * 2 if layers == 4 else ("sliding", "full", "sliding")
    for a, b in zip(pieces(params, cfg, make_mesh("1")), pieces(own, own_cfg, make_mesh(mesh)), strict=True):
        np.testing.assert_array_equal(a.ids, b.ids)


def test_weights_are_cast_once_where_products_are_in_16_bits():
    cfg = change(TINY, model__max_seq_len=64, model__dtype="bfloat16").model
    own, _ = prepared(random_params(cfg), cfg, make_mesh("1"))
    assert {str(a.dtype) for name, a in named(own) if "norm" not in name} == {"bfloat16"}
    assert {str(a.dtype) for name, a in named(own) if "norm" in name} == {"float32"}


def test_an_end_token_ends_a_row_and_nothing_comes_behind():
    free, _ = ids_of(PROMPTS, 30, Sampling())
    end = int(free[0, 4])
    ids, _ = ids_of(PROMPTS, 30, Sampling(), end=end)
    for row in range(len(PROMPTS)):
        expected = free[row].tolist()
        at = expected.index(end) + 1 if end in expected else 30
        found = ids[row].tolist()
        assert found[:at] == expected[: min(at, len(found))]
        assert set(found[at:]) <= {-1}


def test_rows_that_the_caller_stops_are_not_decoded_on():
    sampler, params = made()
    stopped = np.zeros(3, bool)
    pieces = sampler.stream(params, PROMPTS, 20, GREEDY, chunk=4, stopped=stopped)
    next(pieces)
    stopped[1] = True
    assert (next(pieces).ids < 0).all(axis=1).tolist() == [False, True, False]
    stopped[:] = True
    assert list(pieces) == []


def test_one_program_serves_all_settings_and_near_lengths():
    sampler, params = Sampler(CFG, make_mesh("1")), random_params(CFG)
    for prompts, n, sampling in (
        (PROMPTS, 5, GREEDY),
        (PROMPTS, 7, Sampling(top_k=3)),
        ([*PROMPTS[:2], PROMPTS[0], PROMPTS[1]], 6, Sampling(temperature=0.3, top_p=0.5, repetition_penalty=1.2)),
    ):
        list(sampler.stream(params, prompts, n, sampling, chunk=4))
    assert (sampler._prefill._cache_size(), sampler._decode._cache_size()) == (1, 1)


def test_buckets_are_few_and_large_enough():
    lengths = {bucket(n) for n in range(1, 2049)}
    assert all(bucket(n) >= n for n in range(1, 2049))
    assert len(lengths) == 12


def test_only_ids_of_the_tokenizer_are_drawn():
    tokenizer = CharTokenizer("".join(map(chr, range(97, 97 + 50))))
    cfg = change(TINY, model__max_seq_len=512).model
    sampler, params = Sampler(cfg, make_mesh("1"), tokenizer.vocab_size), random_params(cfg)
    found = complete(
        sampler, params, tokenizer, [prompt_ids(tokenizer, of_tokenizer(tokenizer), "abc")] * 4, 500, Sampling()
    )
    ids = np.array([c.ids for c in found])
    assert ids.shape == (4, 500)
    assert ids.max() == 49
    assert set(ids.ravel().tolist()) == set(range(50))
    assert all(len(c.text) == 500 for c in found)


IN_FLOAT32 = dict(width=32, allow_subnormal=False)  # settings are refused that float32 rounds to 0


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    n=st.integers(1, 20),
    seed=st.integers(0, 2**32 - 1),
    sampling=st.builds(
        Sampling,
        repetition_penalty=st.floats(2**-6, 100, **IN_FLOAT32),
        temperature=st.one_of(st.just(0.0), st.floats(0, 1000, **IN_FLOAT32)),
        top_k=st.integers(0, 2**31 - 1),
        top_p=st.floats(2**-20, 1, **IN_FLOAT32),
        min_p=st.floats(0, 1, **IN_FLOAT32),
    ),
)
def test_any_prompts_and_settings_give_known_ids_and_the_same_again(lengths, n, seed, sampling):
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 60, length) for length in lengths]
    ids, log_probs = ids_of(prompts, n, sampling, seed=seed, known=60)
    assert ids.shape == (len(lengths), n)
    assert ((ids >= 0) & (ids < 60)).all()
    assert np.isfinite(log_probs).all()
    assert (log_probs <= 1e-6).all()
    np.testing.assert_array_equal(ids, next(iter(ids_of(prompts, n, sampling, seed=seed, known=60))))


# ---- text

BYTES = ByteTokenizer()
FRAME = of_tokenizer(BYTES)


def text_model():
    cfg = change(TINY, model__max_seq_len=128, model__vocab_size=320).model
    return Sampler.of(cfg, make_mesh("1"), BYTES, FRAME), random_params(cfg)


def grown(texts, stops=()):
    """What a completion shows after each of these pieces of bytes, and at its end."""
    completion, shown = Completion(BYTES, np.array([65]), stops), []
    for text in texts:
        completion.add(list(text), [-1.0] * len(text))
        shown.append(completion.text)
    completion.finish()
    return [*shown, completion.text], completion


def test_characters_appear_when_they_are_whole():
    text = "añ😀b".encode()
    shown, completion = grown([text[i : i + 1] for i in range(len(text))])
    assert shown == ["a", "a", "añ", "añ", "añ", "añ", "añ😀", "añ😀b", "añ😀b"]
    assert completion.reason == "length"


def test_bytes_that_are_no_text_become_replacement_characters():
    assert grown([b"a\xff", b"b", b"\xe2\x82"])[0] == ["a", "a�b", "a�b", "a�b�"]


def test_a_stop_string_ends_the_text_before_it_and_no_part_of_it_is_shown():
    shown, completion = grown([b"one\n", b"\ntwo"], ["\n\n", "xyz"])
    assert shown == ["one", "one", "one"]
    assert completion.reason == "stop"
    assert bytes(completion.ids) == b"one\n\n"
    # What only begins like one is shown as soon as it is known not to be one.
    shown, completion = grown([b"one\n", b"two\nx", b"y"], ["\n\n", "xyz"])
    assert shown == ["one", "one\ntwo\n", "one\ntwo\n", "one\ntwo\nxy"]


def test_of_several_stop_strings_the_first_in_the_text_counts():
    assert grown([b"abcd"], ["cd", "bc"])[1].text == "a"


def test_the_end_token_ends_the_text():
    completion = Completion(BYTES, np.array([65]), ends=FRAME.stops)
    completion.add([66, 256, 67], [-1.0] * 3)
    assert (completion.text, completion.reason, completion.ids) == ("B", "end", [66])


@pytest.mark.parametrize("stops", slow([[], ["a"], ["é", "\n\n"]], but=[["é", "\n\n"]]))
def test_texts_are_the_same_for_every_chunk(stops):
    sampler, params = text_model()
    prompts = [prompt_ids(BYTES, FRAME, text) for text in ("one", "another", "")]
    of = lambda chunk: complete(sampler, params, BYTES, prompts, 60, Sampling(), stops=stops, chunk=chunk)
    expected = of(None)
    for chunk in (1, 7):
        for a, b in zip(of(chunk), expected, strict=True):
            assert (a.text, a.ids, a.reason, a.log_probs) == (b.text, b.ids, b.reason, b.log_probs)
    assert stops == () or {c.reason for c in expected} != {"length"}


def test_what_is_shown_only_grows_into_the_text():
    sampler, params = text_model()
    shown = []
    found = complete(
        sampler,
        params,
        BYTES,
        [prompt_ids(BYTES, FRAME, text) for text in "ab"],
        50,
        Sampling(),
        chunk=4,
        stops=["é"],
        show=lambda cs: shown.append([c.text for c in cs]),
    )
    for row, completion in enumerate(found):
        steps = [texts[row] for texts in shown]
        assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(steps))
        assert steps[-1] == completion.text
    assert len(shown) > 10


def test_an_empty_prompt_begins_as_a_document_does():
    assert prompt_ids(BYTES, FRAME, "").tolist() == [256]
    assert prompt_ids(BYTES, FRAME, "é").tolist() == list("é".encode())
    chars = CharTokenizer("ab")
    assert prompt_ids(chars, of_tokenizer(chars), "").tolist() == []
    # Where training never predicts a first token, no token begins a text.
    assert prompt_ids(BYTES, in_rows(FRAME, follow=False), "").tolist() == []


def test_a_prompt_stands_behind_what_its_tokenizer_puts_before_texts():
    class WithBeginning(ByteTokenizer):
        prefix = (257,)

    frame = in_rows(of_tokenizer(WithBeginning()), follow=False)
    assert prompt_ids(WithBeginning(), frame, "a").tolist() == [257, 97]
    assert prompt_ids(WithBeginning(), frame, "").tolist() == [257]


def test_text_whose_ids_read_by_their_place_is_that_behind_the_prompt():
    class Spaced(ByteTokenizer):  # as SentencePiece: the first space of a text is left out
        def decode(self, ids):
            return super().decode(ids).removeprefix(b" ")

    completion = Completion(Spaced(), np.frombuffer(b" one", np.uint8))
    completion.add(list(b" two"), [-1.0] * 4)
    assert completion.text == " two"
