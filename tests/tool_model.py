"""Makes a small model that calls the two tools of examples/colbench_trl.py: python tests/tool_model.py TASKS FOLDER

A Llama of random parameters learns one dialogue a task and answer by heart: a question, the person's reply, and a
submitted function, which is the reference or one that ends with another value. A trainer samples both."""
import asyncio
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
import colbench_trl  # noqa: E402
import torch  # noqa: E402
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM  # noqa: E402
from trl.chat_template_utils import qwen2_5_chat_template  # noqa: E402

from colbench import backend  # noqa: E402


def call(name, **arguments):
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {
        "name": name, "arguments": arguments}}]}


def dialogue(task, code):
    """(messages, the two tools)."""
    environment = colbench_trl.ColBench(backend.Environment())            # its scorer is not started
    environment.reset(task=json.dumps(task))
    question = next(fact["questions"][0] for fact in task["facts"] if fact["matters"])
    reply = asyncio.run(environment.ask(question))
    return [{"role": "system", "content": colbench_trl.SYSTEM},
            {"role": "user", "content": task["problem_description"]},
            call("ask", question=question), {"role": "tool", "name": "ask", "content": reply},
            call("submit", code=code), {"role": "tool", "name": "submit", "content": "Thank you."},
            {"role": "assistant", "content": "Done."}], [environment.ask, environment.submit]


def main(path, folder):
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models" / "tiny")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"])
    tokenizer.eos_token, tokenizer.chat_template = "<|im_end|>", qwen2_5_chat_template
    tokenizer.pad_token = tokenizer.pad_token or "<|im_start|>"
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None))
    rows = []                                                        # (ids, labels), each (1, T)
    for task in map(json.loads, pathlib.Path(path).read_text().splitlines()):
        reference = task["ground_truth"]
        for code in (reference, f"{reference.rpartition('return')[0]}return 0"):      # differ where nothing follows
            messages, tools = dialogue(task, code)
            text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
            prompt, cue, said = text.partition("<|im_start|>assistant\n")
            prompt, said = (tokenizer(part, add_special_tokens=False).input_ids for part in (prompt + cue, said))
            rows.append((torch.tensor([prompt + said]), torch.tensor([[-100] * len(prompt) + said])))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(150):
        ids, labels = rows[step % len(rows)]
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
