"""Chat templates against transformers' apply_chat_template: the same bytes, and
the same tokens of the assistant."""

import json
import subprocess

import pytest

import chats


def run_driver(program, *arguments):
    driver = program.parents[1] / "tests" / "chat_driver"
    subprocess.run([driver, *arguments], check=True)


def render(program, tmp_path, jobs):
    path, out = tmp_path / "jobs.jsonl", tmp_path / "out.jsonl"
    path.write_text("".join(json.dumps(job) + "\n" for job in jobs))
    run_driver(program, "render", tmp_path, path, out)
    return [json.loads(line) for line in out.read_text().split("\n")[:-1]]


@pytest.mark.parametrize("name", chats.TEMPLATES)
def test_renders_what_transformers_renders(name, program, tmp_path):
    tokenizer = chats.make_tokenizer(chats.template(name))
    tokenizer.save_pretrained(tmp_path)
    jobs = [{**chat, "add_generation_prompt": prompt}
            for chat in chats.conversations() for prompt in (False, True)]
    rendered, refused = 0, 0
    for job, ours in zip(jobs, render(program, tmp_path, jobs), strict=True):
        try:
            text = tokenizer.apply_chat_template(
                job["messages"], tools=job["tools"], tokenize=False,
                add_generation_prompt=job["add_generation_prompt"])
        except Exception as error:
            # Both refuse, for the template's own reason where it gives one.
            assert "error" in ours, (job, error)
            if type(error).__name__ == "TemplateError":
                assert str(error) in ours["error"]
            refused += 1
        else:
            assert ours.get("text") == text, job
            rendered += 1
    assert rendered >= 50 and rendered + refused == 100


def encode(program, tmp_path, records, *max_tokens):
    path, out = tmp_path / "chats.jsonl", tmp_path / "out.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    run_driver(program, "encode", tmp_path, path, out, *max_tokens)
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.parametrize(
    "name", ["llama3_training", "qwen2_5_training", "qwen3_training"])
def test_marks_the_tokens_that_transformers_marks(name, program, tmp_path):
    tokenizer = chats.make_tokenizer(chats.template(name))
    tokenizer.save_pretrained(tmp_path)
    records = [{k: v for k, v in chat.items() if v}
               for chat in chats.conversations()]
    for record, lists in zip(
            records, encode(program, tmp_path, records), strict=True):
        theirs = tokenizer.apply_chat_template(
            record["messages"], tools=record.get("tools"), return_dict=True,
            return_assistant_tokens_mask=True)
        assert [one["ids"] for one in lists] == [theirs["input_ids"]]
        ours = [int(counts) for counts in lists[0]["answers"]]
        assert ours == theirs["assistant_masks"] and sum(ours) > 0


def test_prefixes_mark_what_a_training_template_marks(program, tmp_path):
    """The two forms of Llama 3's template write the same text; the marked one
    counts the answers, and so do we without its marks."""
    marked = chats.make_tokenizer(chats.template("llama3_training"))
    chats.make_tokenizer(chats.template("llama3")).save_pretrained(tmp_path)
    records = [{"messages": chat["messages"]} for chat in chats.conversations()
               if not chat["tools"]]
    for record, lists in zip(
            records, encode(program, tmp_path, records), strict=True):
        theirs = marked.apply_chat_template(
            record["messages"], return_dict=True,
            return_assistant_tokens_mask=True)
        assert [one["ids"] for one in lists] == [theirs["input_ids"]]
        ours = [int(counts) for counts in lists[0]["answers"]]
        assert ours == theirs["assistant_masks"]


def test_an_answer_that_is_rewritten_later_is_learned_as_it_was(
        program, tmp_path):
    """Qwen 3 leaves out the reasoning of earlier turns."""
    tokenizer = chats.make_tokenizer(chats.template("qwen3"))
    tokenizer.save_pretrained(tmp_path)
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "1", "reasoning_content": "hm"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "2", "reasoning_content": "aha"},
    ]
    (lists,) = encode(program, tmp_path, [{"messages": messages}])
    assert [one["ids"] for one in lists] == [
        tokenizer.apply_chat_template(messages[:end])["input_ids"]
        for end in (2, 4)]
    learned = [tokenizer.decode([token for token, counts in zip(
        one["ids"], one["answers"], strict=True) if counts]) for one in lists]
    assert learned == ["<think>\nhm\n</think>\n\n1<|im_end|>\n",
                       "<think>\naha\n</think>\n\n2<|im_end|>\n"]


@pytest.mark.parametrize("name", ["llama3", "qwen3", "gemma3", "mistral_v3"])
def test_a_long_chat_is_the_same_up_to_where_it_is_cut(
        name, program, tmp_path):
    """Answers far behind that are left out, or its time would grow with the
    square of its messages."""
    chats.make_tokenizer(chats.template(name)).save_pretrained(tmp_path)
    messages = [message for i in range(150) for message in (
        {"role": "user", "content": f"question {i} \u00e9t\u00e9"},
        {"role": "assistant", "content": f"answer {i}: " + "word " * (i % 7)})]
    record = {"messages": messages}
    (whole,) = encode(program, tmp_path, [record])
    for tokens in (60, 500):
        (some,) = encode(program, tmp_path, [record], str(tokens))

        def used(lists):
            cut = [(one["ids"][:tokens], one["answers"][:tokens])
                   for one in lists]
            return [one for one in cut if any(one[1])]

        assert used(some) == used(whole) and used(some)
        assert (sum(len(one["ids"]) for one in some)
                < sum(len(one["ids"]) for one in whole) / 2)


def test_small_things_are_as_jinja_has_them(program, tmp_path):
    """Each a line of one template: what published ones seldom use."""
    uses = [
        "{{ \"it's a-b (c {d [e <f\"|title }} {{ \"it's a-b\".title() }} {{ '\u01c6 \u00df'|title }}",
        "{{ {'a': [1, {'b': 2}], 'c': []}|tojson(indent='\\t') }} {{ [1]|tojson(indent=2) }}",
        "{{ '+5'|int }} {{ ' 1_000 '|int }} {{ '-7'|int }} {{ '+-5'|int(3) }} {{ '1__0'|int(3) }} "
        "{{ '+1_0.5'|float }} {{ 'nan(1)'|float }} {{ [1]|tojson(indent=true) }}",
        "{{ 42|round }} {{ 42.5|round }} {{ 43.5|round }} {{ 2.675|round(2) }} {{ 0.5|round(0, 'ceil') }} "
        "{{ 7|round(1, 'floor') }} {{ 1234.5|round(-2) }} {{ 1250|round(-2) }} {{ 1350|round(-2) }} "
        "{{ -1251|round(-2) }} {{ 5|round(-400) }} {{ 5.0|round(-400) }} {{ 1234567890123456789|round(-1) }} "
        "{{ -0.4|round }}",
        "{{ \"it's a b_c, d-e \u00e9\u00df 1\u00b2\"|wordcount }} {{ ''|wordcount }}",
        "{{ '\u0661\u00b2\u2460'.isdigit() }} {{ '1\u00bd'.isdigit() }} {{ '12'.isdigit() }} {{ ''.isdigit() }}",
        "{% for a in [1, 2] %}{% for b in [1] %}{{ loop.depth }}{{ loop.depth0 }}{% endfor %}"
        "{{ loop.depth }}{% endfor %}",
        "x\n  {% raw %}\n  {{ y }}\n  {% endraw %}\nz",
        "x  {% raw -%}\n  {{ y }}  {%- endraw %} z {% raw %} {% endraw %}",
        "x\n  {%+ raw %} a\n  {%+ endraw %}\nz",
    ]
    source = "\n|\n".join(uses)
    tokenizer = chats.make_tokenizer(source)
    tokenizer.save_pretrained(tmp_path)
    job = {"messages": [{"role": "user", "content": "c"}], "tools": None, "add_generation_prompt": False}
    theirs = tokenizer.apply_chat_template(job["messages"], tokenize=False)
    [ours] = render(program, tmp_path, [job])
    assert ours.get("text", ours).split("|\n") == theirs.split("|\n")


def test_what_is_not_there_is_refused_by_name(program, tmp_path):
    chats.make_tokenizer("{% for m in messages %}\n{{ m|frobnicate }}"
                         "{% endfor %}").save_pretrained(tmp_path)
    driver = program.parents[1] / "tests" / "chat_driver"
    done = subprocess.run([driver, "render", tmp_path, "/dev/null", "/dev/null"],
                          capture_output=True, text=True)
    assert done.returncode == 1
    assert "line 2: the filter 'frobnicate' is not supported" in done.stderr
