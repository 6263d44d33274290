"""How a reward model with another tokenizer reads texts: templates, pairs of texts, truncation, pad tokens.

Mutations that must fail here: special strings of the user read as control tokens; the response's end cut before the
prompt's beginning; BOS cut off; token types all 0; the pad token recorded in one place only.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlhf_core.models.batching import collate
from rlhf_core.models.forward import for_all_rows, sequence_scores, without_pads
from rlhf_core.models.loading import load_classifier, new_classifier, save_pretrained
from rlhf_core.models.memory import TokenBudget
from rlhf_core.models.reward_text import TextReader, text_ids, text_reader
from rlhf_core.models.tokenizer import load_tokenizer
from tests.tiny import tiny_tokenizer
from tests.tiny_encoder import encoder_tokenizer, save_encoder

CPU = torch.device("cpu")
USER = [{"role": "user", "content": "ab"}]


def decoder(max_tokens: int | None = None, *, template: bool = True) -> TextReader:
    tokenizer = tiny_tokenizer()
    if not template:
        tokenizer.chat_template = None
    return TextReader(tokenizer, max_tokens)


def tokens(reader: TextReader, ids: tuple[list[int], list[int]]) -> tuple[list[str], list[str]]:
    convert = reader.tokenizer.convert_ids_to_tokens
    return convert(ids[0]), convert(ids[1])


def test_turns_are_rendered_with_the_model_s_own_template() -> None:
    reader = decoder()
    prompt, response = text_ids(reader, USER, "hello")
    assert reader.tokenizer.decode(prompt) == "<bos><|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n"
    assert tokens(reader, (prompt, response))[1] == ["hello", "<eos>"]


def test_without_a_template_one_turn_is_plain_text_and_more_have_their_roles() -> None:
    reader = decoder(template=False)
    assert tokens(reader, text_ids(reader, USER, "a")) == (["<bos>", "ab"], ["a", "<eos>"])
    turns = [*USER, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    prompt, _ = text_ids(reader, turns, "a")
    assert reader.tokenizer.decode(prompt) == "<bos>user: ab\n\nassistant: b\n\nuser: c"


def test_an_encoder_gets_its_own_form_of_a_pair() -> None:
    reader = TextReader(encoder_tokenizer(), None)
    found = tokens(reader, text_ids(reader, USER, "hello a"))
    assert found == (["[CLS]", "a", "##b", "[SEP]"], ["hello", "a", "[SEP]"])


@pytest.mark.parametrize("content, response", [("[SEP]", "a"), (USER, "[SEP][CLS]")])
def test_special_strings_in_texts_are_plain_text_to_an_encoder(content, response) -> None:
    prompt, answer = text_ids(TextReader(encoder_tokenizer(), None), content, response)
    assert [prompt.count(3), answer.count(3), (prompt + answer).count(2)] == [1, 1, 1]


def test_special_strings_in_texts_are_plain_text_to_a_decoder() -> None:
    prompt, answer = text_ids(decoder(), [{"role": "user", "content": "<eos>"}], "<eos>a")
    assert prompt.count(2) == 0 and answer.count(2) == 1 and answer[-1] == 2


def test_a_long_row_loses_the_beginning_of_its_prompt_then_the_end_of_its_response() -> None:
    # "[CLS] a b c d [SEP] a b [SEP]": 9 tokens.
    for limit, expected in {
        9: (["[CLS]", "a", "b", "c", "d", "[SEP]"], ["a", "b", "[SEP]"]),
        7: (["[CLS]", "c", "d", "[SEP]"], ["a", "b", "[SEP]"]),
        4: (["[CLS]", "[SEP]"], ["a", "[SEP]"]),
    }.items():
        reader = TextReader(encoder_tokenizer(), limit)
        assert tokens(reader, text_ids(reader, "a b c d", "a b")) == expected
    # "<bos> a b c | d <eos>" of a decoder: the BOS stays, and of the response the EOS goes first.
    for limit, expected in {
        6: (["<bos>", "c", "b", "c"], ["d", "<eos>"]),
        4: (["<bos>", "c"], ["d", "<eos>"]),
        2: (["<bos>"], ["d"]),
    }.items():
        reader = decoder(limit, template=False)
        assert tokens(reader, text_ids(reader, "cbc", "d")) == expected


def test_the_limit_is_the_lower_one_of_positions_and_tokenizer(tmp_path: Path) -> None:
    model = new_classifier(save_encoder(tmp_path), device=CPU, precision="float32", seed=0)
    assert text_reader(model, encoder_tokenizer(32)).max_tokens == 32
    assert text_reader(model, encoder_tokenizer(10**30)).max_tokens == 64  # its positions


def test_roberta_s_positions_begin_behind_the_pad_id() -> None:
    from transformers import RobertaConfig, RobertaForSequenceClassification

    config = RobertaConfig(
        vocab_size=70, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_labels=1,
        max_position_embeddings=14, pad_token_id=1,
    )  # fmt: skip
    reader = text_reader(RobertaForSequenceClassification(config), encoder_tokenizer(10**30))
    assert reader.max_tokens == 12


def test_an_encoder_s_score_is_that_of_transformers_with_token_types(tmp_path: Path) -> None:
    model = new_classifier(save_encoder(tmp_path, classifier=True), device=CPU, precision="float32", seed=0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    texts = [("a b", "hello good"), ("c", "bad"), ("ab", "a b c d")]
    reader = text_reader(model, tokenizer)
    rows = [text_ids(reader, prompt, response) for prompt, response in texts]
    batch = collate([p for p, _ in rows], [r for _, r in rows], range(3), pad_id=0, device=CPU)
    with torch.no_grad():
        found = sequence_scores(model, batch, precision="float32")
        for row, (prompt, response) in enumerate(texts):
            encoded = tokenizer(prompt, response, return_tensors="pt", return_token_type_ids=True)
            assert encoded["token_type_ids"].sum() > 0
            assert found[row].item() == pytest.approx(model(**encoded).logits.item(), abs=1e-5)


def test_a_tokenizer_without_pad_token_gets_one_in_both_places_and_no_score_depends_on_the_batch(
    tiny_dir: Path, tmp_path: Path
) -> None:
    source = shutil.copytree(tiny_dir, tmp_path / "source")
    for name in ("tokenizer_config.json", "config.json"):
        described = json.loads((source / name).read_text())
        described.pop("pad_token", None)
        described.pop("pad_token_id", None)
        (source / name).write_text(json.dumps(described))
    model, tokenizer = new_classifier(source, device=CPU, precision="float32", seed=0), load_tokenizer(source)
    reader = text_reader(model, tokenizer)
    save_pretrained(model, tokenizer, tmp_path / "saved", card="x")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").pad_token_id == 2
    again = load_classifier(tmp_path / "saved", device=CPU, precision="float32")
    assert again.config.pad_token_id == 2 and again.get_input_embeddings().weight.shape[0] == 266

    rows = [text_ids(reader, "a", text) for text in ("", "cde", "cdefghij")]
    expected = []
    model.config.pad_token_id = 0  # where pad is the EOS, transformers reads the score before it; here no row holds a 0
    for prompt, response in rows:  # transformers, one row at a time
        with torch.no_grad():
            expected.append(model(torch.tensor([prompt + response])).logits.item())
    for order in ([0, 1, 2], [2, 0, 1]):
        for budget in (1, 30, 100):
            found = for_all_rows(
                lambda batch: list(sequence_scores(again, batch, precision="float32")),
                [rows[row][0] for row in order],
                [rows[row][1] for row in order],
                packed=without_pads(again),
                budget=TokenBudget(budget),
                pad_id=2,
                device=CPU,
                progress=lambda rows: None,
            )
            assert [float(score) for score in found] == pytest.approx([expected[row] for row in order], abs=1e-4)


def test_an_encoder_without_its_head_is_refused_for_scoring(tmp_path: Path) -> None:
    from rlhf_core.errors import ModelError

    with pytest.raises(ModelError, match=r"classifier\.(bias|weight).*random"):
        load_classifier(save_encoder(tmp_path), device=CPU, precision="float32")


def test_an_encoder_with_several_labels_is_refused_by_name(tmp_path: Path) -> None:
    from rlhf_core.errors import ModelError

    save_encoder(tmp_path, classifier=True, labels=3)
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path).config.num_labels == 3
    for load in (load_classifier, lambda *a, **k: new_classifier(*a, **k, seed=0)):
        with pytest.raises(ModelError, match=rf"{tmp_path}.*3 labels"):
            load(tmp_path, device=CPU, precision="float32")
