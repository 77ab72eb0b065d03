"""Chat templates against transformers' apply_chat_template: the same bytes."""

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


def test_marks_what_transformers_marks(program, tmp_path):
    from transformers.utils.chat_template_utils import render_jinja_template

    source = chats.template("qwen3_training")
    chats.make_tokenizer(source).save_pretrained(tmp_path)
    jobs = [{**chat, "add_generation_prompt": False}
            for chat in chats.conversations()]
    texts, spans = render_jinja_template(
        [job["messages"] for job in jobs], tools=None, chat_template=source,
        return_assistant_tokens_mask=True)
    jobs = [{**job, "tools": None} for job in jobs]
    for ours, text, marked in zip(
            render(program, tmp_path, jobs), texts, spans, strict=True):
        assert ours["text"] == text
        whole = text.encode()
        assert [whole[a:b].decode() for a, b in ours["answers"]] == [
            text[a:b] for a, b in marked]


def test_what_is_not_there_is_refused_by_name(program, tmp_path):
    chats.make_tokenizer("{% for m in messages %}\n{{ m|frobnicate }}"
                         "{% endfor %}").save_pretrained(tmp_path)
    driver = program.parents[1] / "tests" / "chat_driver"
    done = subprocess.run([driver, "render", tmp_path, "/dev/null", "/dev/null"],
                          capture_output=True, text=True)
    assert done.returncode == 1
    assert "line 2: the filter 'frobnicate' is not supported" in done.stderr
