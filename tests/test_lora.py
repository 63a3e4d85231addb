"""LoRA in 03 and 04: what is trained, the model without its adapter, adapter folders, whole models, bad flags."""
import functools
import json
import math
import re
import shutil
import sys

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

import common
import lib.load
from colbench import backend
from compare import assert_same_steps, furthest, load_split, set_weights, weights
from conftest import BASE, call, dies, load_critic, read, refused, succeed, write
from lib.load import adapter_off, load_model, lora_config, save_model, Sharding
from lib.logps import action_outputs, ActionModel, collate, HeadModel, load_whole, Sequence
from lib.runtime import InputError
from lib.training import adamw, Checkpoints

LORA, DPO = ["--lora", 4], ["--method", "mtdpo"]
AN_ITEM = [[Sequence([5, 6, 7, 8, 9, 10, 11], [-1, -1, 0, 0, 1, 1, 1], 2)]]


def flags(data, out, *more):
    return ["--trajectories", data / "demos.jsonl", "--num-trajectories", 12, "--model", BASE, "--lr", 1e-2,
            "--max-steps", 4, "--batch-size", 2, "--save-every", 2, "--nll-coef", 0, "--beta", 1, *LORA, "--out", out,
            *more]


def outputs_of(action_model):
    """Numbers of AN_ITEM's turns."""
    return action_outputs(action_model, AN_ITEM, 4096)[0]


def values_of(folder, dtype="float32"):
    """outputs_of the model of a folder, loaded whole (02)."""
    return outputs_of(ActionModel(load_model(str(folder), "cpu", dtype)[0]))


def with_tensors(folder, tensors, out):
    """A copy of an adapter folder with other tensors."""
    shutil.copytree(folder, out)
    save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})
    return out


def with_base(folder, base, out):
    """A copy of an adapter folder that names another base."""
    config = shutil.copytree(folder, out) / "adapter_config.json"
    config.write_text(config.read_text().replace(str(BASE), str(base)))
    return out


@pytest.fixture(scope="module")
def critic(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("lora") / "critic"
    call(3, *flags(data, out))
    return out


@pytest.fixture(scope="module")
def policy(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("lora") / "policy"
    call(4, *DPO, *flags(data, out))
    return out


@pytest.fixture(scope="module")
def policy_of_two_ranks(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("lora") / "two"
    succeed("04_train_policy.py", *DPO, *flags(data, out, "--activation-checkpointing"), ranks=2)
    return out


def adapter(folder):
    return load_file(folder / "adapter_model.safetensors")


def largest_b(tensors):
    """Of the second matrices of adapters, which begin at 0."""
    return max(tensor.abs().max().item() for key, tensor in tensors.items() if "lora_B" in key)


def test_the_first_loss_is_log_2_and_it_falls(critic, policy):
    for folder in (critic, policy):
        steps = read(folder / "metrics.jsonl")
        assert steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-5) and steps[-1]["loss"] < 0.68


def test_the_adapter_alone_is_trained_and_kept_in_states(tmp_path):
    """In bfloat16: base weights in bfloat16, adapters and the optimiser's state in float32, two numbers for each."""
    config = lora_config(str(BASE), 4, None, False)
    action_model = load_split(BASE, Sharding("bfloat16"), lora=config, kind=HeadModel)
    optimizer = adamw(action_model, 1e-2)
    action_model(collate(AN_ITEM)).sum().backward()
    optimizer.step()
    state, parameters = Checkpoints(tmp_path, action_model, optimizer).state(), dict(action_model.named_parameters())
    trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
    assert trained == set(state["model"]) and all(".lora_" in name or name.startswith("head.") for name in trained)
    assert len(trained) == 3 * 7 * 2 + 2
    for name, parameter in parameters.items():
        assert parameter.dtype == (torch.float32 if name in trained else torch.bfloat16), name
    assert set(state["optimizer"]["state"]) == trained
    assert all(values["exp_avg"].dtype == torch.float32 for values in state["optimizer"]["state"].values())
    adapted = load_critic(load=lambda *_, **__: action_model)       # an agent
    assert adapted.ref_model is action_model


def test_killed_and_resumed_equals_uninterrupted_bit_for_bit(data, tmp_path, critic):
    with dies(Checkpoints, "save", calls=1):                         # at the end
        call(3, *flags(data, tmp_path / "killed"))
    with pytest.raises(InputError, match="its training is not finished"):
        lib.load.load_tokenizer(tmp_path / "killed")
    assert "continues at step 2\n" in call(3, *flags(data, tmp_path / "killed"))
    killed, whole = adapter(tmp_path / "killed"), adapter(critic)
    assert len(whole) == 42 and all(torch.equal(killed[name], whole[name]) for name in whole)
    assert (tmp_path / "killed" / "adapter_config.json").read_text() == (critic / "adapter_config.json").read_text()


def test_ranks_and_checkpointing_change_nothing_but_the_last_digits(policy, policy_of_two_ranks):
    assert_same_steps(policy_of_two_ranks, policy)
    assert furthest(adapter(policy_of_two_ranks), adapter(policy)) < 1e-3 < 1e-2 < largest_b(adapter(policy))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_its_adapter_a_critic_is_its_base_bit_for_bit(critic, tiny, dtype, monkeypatch):
    """Whole, and as it is loaded for training: in bfloat16 by FSDP2, as on several ranks. One copy of the base is in
    memory."""
    monkeypatch.setattr(Sharding, "uses_fsdp", lambda self, *_: self.dtype == "bfloat16")
    for load in (load_whole("cpu", dtype), functools.partial(load_split, sharding=Sharding(dtype))):
        expected = outputs_of(load(str(BASE)))
        if dtype == "float32":
            assert torch.equal(expected, outputs_of(ActionModel(tiny[0])))
        loaded = load_critic(critic, load=load)
        assert loaded.ref_model is loaded.model
        for _ in range(2):                                          # on again, and off again
            assert (outputs_of(loaded.model) - expected).abs().max() > 1e-3
            with adapter_off(loaded.ref_model.model):
                assert torch.equal(outputs_of(loaded.ref_model), expected)


def test_the_reference_of_an_untrained_agent_s_adapter_has_the_adapter(data, policy):
    """In bfloat16, in which adapters stay apart: 02 --best-of --critic untrained."""
    row = read(data / "demos.jsonl")[0]
    critic = load_critic(model=policy, load=load_whole("cpu", "bfloat16"))
    state = common.State("<|user|>?<|end|><|assistant|>", row["task"], [], [[7, 8, 9]], [])
    logps, ref_logps = (action_outputs(critic.model, critic.state_items([state], sees_c), 4096)[0]
                        for sees_c in (True, False))
    with adapter_off(critic.model.model):
        [off] = action_outputs(critic.model, critic.state_items([state], False), 4096)
    assert critic.score_actions([state]) == [[pytest.approx((logps - ref_logps).item() / 3, abs=1e-6)]]
    assert (off - ref_logps).abs().item() > 1e-3


def test_peft_reads_the_folder_and_finds_the_same_values(policy):
    from peft import AutoPeftModelForCausalLM
    config = json.loads((policy / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 8, str(BASE))
    assert config["target_modules"] == sorted(config["target_modules"]) and len(config["target_modules"]) == 7
    theirs = AutoPeftModelForCausalLM.from_pretrained(policy).base_model.model.eval()
    values = values_of(policy)
    torch.testing.assert_close(values, outputs_of(ActionModel(theirs)), atol=1e-4, rtol=1e-5)
    assert (values - values_of(BASE)).abs().max() > 1e-2
    assert not (policy / "model.safetensors").exists() and (policy / "chat_template.jinja").exists()


def scaled(folder, share, out):
    """A copy of an adapter folder that adds only a share of what it added."""
    tensors = {name: tensor * share if "lora_B" in name else tensor for name, tensor in adapter(folder).items()}
    return with_tensors(folder, tensors, out)


def both_ways(folder):
    """Numbers of AN_ITEM's turns from the model of a folder, loaded whole and for training."""
    return values_of(folder), outputs_of(load_split(folder))


def test_a_folder_is_what_its_weight_files_are(policy, tmp_path, capsys):
    """With a config.json of its base beside it an adapter is still one. A whole model is loaded as it is: no adapter
    beside it is applied. An adapter of an adapter is refused."""
    expected = values_of(policy)
    for name in ("adapter", "merged"):
        shutil.copytree(policy, tmp_path / name)
    shutil.copy(BASE / "config.json", tmp_path / "adapter")
    load_model(str(policy), "cpu")[0].save_pretrained(tmp_path / "merged")
    capsys.readouterr()
    for name, atol in (("adapter", 0), ("merged", 1e-4)):
        for values in both_ways(tmp_path / name):
            torch.testing.assert_close(values, expected, atol=atol, rtol=0)
    assert capsys.readouterr().out.count("the adapter in the same folder is not applied") == 2
    with pytest.raises(InputError, match="second: its base model .*policy is also an adapter; merge that"):
        values_of(with_base(policy, policy, tmp_path / "second"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_tensor_stays_without_a_value(dtype, monkeypatch):
    """Whole, and split by FSDP2: where the files make another model than the configuration."""
    read_files = lib.load.whole_model

    def adapted(*arguments):
        model = read_files(*arguments)
        lib.load.add_adapter(model, lora_config(str(BASE), 4, ["q_proj"], False))
        return model
    monkeypatch.setattr(lib.load, "whole_model", adapted)
    with pytest.raises(InputError, match="no model of this name could be loaded .*Error"):
        load_split(BASE, Sharding(dtype))


def of_peft(config, folder, std=0.1):
    """Write an adapter of random numbers for BASE; returns the numbers of AN_ITEM's turns from PEFT's own model."""
    torch.manual_seed(0)
    config.base_model_name_or_path = str(BASE)
    model = peft.get_peft_model(load_model(str(BASE), "cpu")[0], config).eval()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += std * torch.randn(parameter.shape)
    model.save_pretrained(folder)
    [[row]] = AN_ITEM
    values = []
    for number in range(2):
        ids = row.ids[:row.prompt_length]
        ids = ids + [token for token, turn_id in zip(row.ids, row.action_ids) if turn_id == number]
        logps = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0, :-1], -1)
        values.append(logps[range(len(ids) - 1), ids[1:]][row.prompt_length - 1:].sum().item())
    return torch.tensor(values)


@pytest.mark.parametrize("options, in_bfloat16", [
    ({"target_modules": ["q_proj", "lm_head"]}, False), ({"target_modules": ["embed_tokens"]}, True),
    ({"target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": True}, False),
    ({"modules_to_save": ["lm_head"]}, True), ({"modules_to_save": ["embed_tokens"]}, True),
    ({"trainable_token_indices": [5, 8, 11]}, True), ({"trainable_token_indices": {"lm_head": [5, 8, 11]}}, True)])
def test_adapters_of_embeddings_and_the_output_layer(tmp_path, options, in_bfloat16):
    """Both are one tensor in the base: a change of one does not change the other. In bfloat16 an output layer with LoRA
    is refused, however small its part is."""
    config = peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj"], **options})
    expected = of_peft(config, tmp_path / "adapter")
    assert (expected - values_of(BASE)).abs().max() > 0.5
    for values in both_ways(tmp_path / "adapter"):
        torch.testing.assert_close(values, expected, atol=1e-3, rtol=0)
    if in_bfloat16:
        torch.testing.assert_close(values_of(tmp_path / "adapter", "bfloat16"), expected, atol=0.3, rtol=0)
        return
    for std in (0.1, 1e-5):
        of_peft(config, tmp_path / "adapter", std)
        with pytest.raises(InputError, match="adapter: its output layer computes more .* --dtype float32"):
            values_of(tmp_path / "adapter", "bfloat16")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_that_change_no_weights_are_refused(tmp_path, dtype):
    virtual = peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    activated = peft.LoraConfig(r=4, target_modules=["q_proj"], alora_invocation_tokens=[7], task_type="CAUSAL_LM")
    for name, config in (("PROMPT_TUNING", virtual), ("LORA", activated)):
        of_peft(config, tmp_path / name)
        with pytest.raises(InputError, match=f"{name}: its {name} adapter cannot be merged into the weights of its"):
            values_of(tmp_path / name, dtype)


def test_an_adapter_file_holds_what_its_configuration_names(policy, critic, tiny, tmp_path):
    """PEFT only warns of a tensor that it lacks, and says nothing of others."""
    for folder in (policy, critic):
        for change in ("missing", "more"):
            tensors = adapter(folder)
            if change == "more":
                tensors["base_model.model.lm_head.lora_A.weight"] = tensors[min(tensors)].clone()
            else:
                del tensors[min(tensors)]
            out = with_tensors(folder, tensors, tmp_path / f"{folder.name}-{change}")
            with pytest.raises(InputError, match=f"{out.name}: its weights are not those that adapter_config.json"):
                if folder is policy:
                    values_of(out)
                else:
                    load_critic(out)


def test_bfloat16_keeps_small_adapters(policy, tmp_path):
    """What an adapter adds to each weight of a model that computes in bfloat16, against float32: rounded once."""
    small, checked = scaled(policy, 0.1, tmp_path / "small"), 0
    model = load_model(str(small), "cpu", "bfloat16")[0]
    tensors = adapter(small)
    for key, b in tensors.items():
        if "lora_B" in key:
            name = key.removeprefix("base_model.model.").removesuffix(".lora_B.weight")
            expected = 8 / 4 * (b @ tensors[key.replace("lora_B", "lora_A")])
            found = model.get_submodule(name).get_delta_weight("default").float()
            assert (found - expected).norm() < 0.01 * expected.norm(), name
            checked += 1
    assert checked == 21 and {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    torch.testing.assert_close(outputs_of(ActionModel(model)), values_of(small), atol=0.3, rtol=0.02)


def check_merged(merged, apart, atol):
    """Bit for bit what the base's files hold where there is no adapter; the sum in float32 where there is."""
    tensors, base, added = adapter(apart), weights(BASE), 0
    for name, tensor in weights(merged).items():
        key = "base_model.model." + name.removesuffix(".weight")
        if f"{key}.lora_B.weight" in tensors:
            delta = 2 * (tensors[f"{key}.lora_B.weight"] @ tensors[f"{key}.lora_A.weight"])
            torch.testing.assert_close(tensor - base[name], delta, atol=atol, rtol=0)
            added += 1
        else:
            assert torch.equal(tensor, base[name]), name
    assert added == 21 and json.loads((merged / "config.json").read_text())["dtype"] == "float32"
    assert not (merged / "adapter_config.json").exists()


def test_merged_is_the_float32_base_and_the_adapter(data, tmp_path, policy_of_two_ranks, policy, tiny):
    succeed("04_train_policy.py", *DPO, *flags(data, tmp_path / "two", "--merge"), ranks=2)
    check_merged(tmp_path / "two", policy_of_two_ranks, 1e-5)
    assert not (tmp_path / "two" / "initial").exists()
    action_model = load_split(BASE, Sharding("bfloat16"), lora=lora_config(str(BASE), 4, None, False))
    lib.load.load_adapter(action_model.model, policy)
    save_model(tmp_path / "one", action_model.model, tiny[1], merge=True)
    check_merged(tmp_path / "one", policy, 1e-6)


def ids_sampled(data, out, agent, *more):
    """The ids that an agent samples in dialogues of two tasks with the same random numbers, a list a turn."""
    tasks = write(out.with_suffix(".tasks"), read(data / "tasks.jsonl")[:2])
    call(2, "--tasks", tasks, "--agent", agent, "--max-rounds", 2, "--max-new-tokens", 30, "--out", out, *more)
    rows, ids = read(out), []
    assert len(rows) == 2
    for row in rows:
        ids += [turn["output_ids"] for turn in row["dialogue_history"] if turn["role"] == "assistant"]
    return ids


def test_in_02_adapters_play_and_choose(data, critic, policy, tmp_path):
    """The agent's adapter plays, too: it says something else than its base. The critic prefers another message than the
    first one, which a critic without its adapter, whose scores are all 0, sends as an agent without a critic does. (And
    an untrained critic chooses by what c makes likelier.)"""
    first, base = (ids_sampled(data, tmp_path / f"{agent.name}.jsonl", agent) for agent in (policy, BASE))
    untrained = ids_sampled(data, tmp_path / "untrained.jsonl", BASE, "--best-of", 2, "--critic", "untrained",
                            "--reference-sees-c", "no")
    assert len({json.dumps(ids) for ids in (first, base, untrained)}) == 3
    chosen = ids_sampled(data, tmp_path / "chosen.jsonl", policy, "--best-of", 2, "--critic", critic)
    assert chosen != first
    useless = scaled(critic, 0, tmp_path / "critic")
    assert ids_sampled(data, tmp_path / "useless.jsonl", policy, "--best-of", 2, "--critic", useless) == first


def test_04_takes_adapter_folders(data, critic, policy, tmp_path):
    """04 scores by the critic on two ranks, trains from the adapter as a whole model, and says the same scores as one
    rank does."""
    sweet = ["--method", "sweet", "--critic", critic, "--trajectories", data / "demos.jsonl", "--data-frac", 0.01,
             "--num-candidates", 4, "--max-new-tokens", 30, "--max-steps", 1, "--model", policy]
    call(4, *sweet, "--out", tmp_path / "one")
    succeed("04_train_policy.py", *sweet, "--out", tmp_path / "two", ranks=2)
    one, two = ([value for row in read(tmp_path / name / "scored.jsonl") for value in row["advantages"]]
                for name in ("one", "two"))
    assert one == pytest.approx(two, abs=1e-4) and max(map(abs, one)) > 1e-3
    assert (tmp_path / "one" / "model.safetensors").exists() and not (tmp_path / "one" / "initial").exists()


def test_a_head_is_trained_beside_the_adapter(data, tmp_path, tiny):
    out = tmp_path / "critic"
    call(3, *flags(data, out, "--score", "value"))
    assert read(out / "metrics.jsonl")[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    loaded = load_critic(out)
    assert loaded.model.head.weight.abs().max() > 1e-3
    assert largest_b(adapter(out)) > 1e-3
    assert len(set(outputs_of(loaded.model).tolist())) == 2


def test_a_base_that_moved_or_changed_is_one_line(data, critic, policy, tiny, tmp_path):
    for folder in (policy, critic):
        with_base(folder, tmp_path / "moved", tmp_path / folder.name)
    play = ["--tasks", data / "tasks.jsonl", "--out", tmp_path / "x", "--agent"]
    best = [*play, BASE, "--best-of", 2, "--critic", tmp_path / "critic"]
    for arguments in ([*play, tmp_path / "policy"], best):
        assert re.search(r"its base model cannot be used \(.*moved.*; write where it is into .*adapter_config",
                         refused(2, *arguments))
    shutil.copytree(BASE, tmp_path / "moved")
    assert load_model(str(tmp_path / "policy"), "cpu")[0] and common.read_critic(tmp_path / "critic", backend)
    set_weights(tmp_path / "moved", {name: tensor * 1.01 for name, tensor in weights(BASE).items()})
    for folder, arguments in (("critic", best), ("policy", [*play, tmp_path / "policy"])):
        assert refused(2, *arguments) == (
            f"{tmp_path / folder}: was trained from {tmp_path / 'moved'}, whose weights have changed since; put them "
            f"back, or train {tmp_path / folder} again")
    assert not (tmp_path / "x").exists()


def test_bad_flags_are_one_line(data, policy, tmp_path, monkeypatch):
    out, method = tmp_path / "x", ["--method", "sft", "--trajectories", data / "demos.jsonl"]
    for flag in (["--lora-targets", "q_proj"], ["--merge"]):
        assert refused(4, *method, "--model", BASE, "--out", out, *flag) == f"{flag[0]} needs --lora RANK"
    assert refused(4, *method, "--model", "tiny", "--out", out, *LORA).startswith("tiny: no model of this name")
    assert "--merge" in refused(4, *method, "--model", policy, "--out", out, *LORA)
    for targets in (["nothing"], ["q_proj", "nothing"], ["lm_head"], ["embed_tokens"]):
        line = refused(3, *flags(data, out, "--lora-targets", *targets))
        assert line == f"--lora-targets {targets[-1]}: names no linear layer of the model"
    monkeypatch.setitem(sys.modules, "peft", None)
    assert refused(3, *flags(data, out)) == "LoRA adapters need peft: pip install peft"
    with pytest.raises(InputError, match="pip install peft"):
        values_of(policy)
    assert not out.exists()
