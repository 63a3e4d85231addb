"""Vision-language models: a user simulator that sees pages, and what a visual critic needs.

`views` of a turn, ((caption, document or None), …), are what such a critic is shown of it (`views` of a domain). A row,
(ids, image files), is the chat that shows them; None in place of a file is a black image."""
import itertools
from typing import Callable, NamedTuple

import torch

from lib.load import from_pretrained, load_files, load_tokenizer, loading, read_config
from lib.runtime import InputError, say
from lib.servers import Reply
from lib.statistics import agent_places
from lib.tokens import decode, encode, plain_chat, render_chat, stop_ids

MAX_PIXELS = 1280 * 28 * 28
BLACK = 56, 56                                  # width and height of what stands for an image that is not there


# ---------------------------------------------------------------------------------------------------------------------
# loading

def load_processor(name):
    """A vision-language model's tokenizer, chat template and image processor in one. Qwen2-VL's is put together without
    the video processor, which needs torchvision, and scales images down to MAX_PIXELS, if not to fewer."""
    import transformers
    if not read_config(name).model_type.startswith("qwen"):
        return from_pretrained(transformers.AutoProcessor, name)
    with loading(name):
        kind = type("Qwen2VLProcessor", (transformers.Qwen2VLProcessor,),
                    {"get_attributes": classmethod(lambda cls: ["image_processor", "tokenizer"])})
        tokenizer = load_tokenizer(name)
        images = from_pretrained(transformers.Qwen2VLImageProcessorPil, name)
        images.size["longest_edge"] = min(images.size["longest_edge"], MAX_PIXELS)
        return kind(images, tokenizer, chat_template=tokenizer.chat_template)


def load_vision(name, device, dtype="float32"):
    """(model, processor) of any vision-language model, for vision_reply."""
    import transformers
    if type(read_config(name)) not in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        raise InputError(f"{name}: sees no images; name a vision-language model (Qwen2-VL, say)")
    model = load_files(transformers.AutoModelForImageTextToText, name, getattr(torch, dtype))
    return model.to(device).eval(), load_processor(name)


def critic_processor(name, head, domain, path):
    """The processor of a model that is trained as a visual critic; InputError where it cannot be one.
    head: --head. path: of the trajectories, which are of the domain."""
    if not domain.views:
        raise InputError(f"{name}: a model that sees can be no critic of {domain.NOUN}s ({path}), which have nothing "
                         "to see; name a language model")
    if head == "lm":
        raise InputError(f"{name}: a model that sees needs --head regression (or value); one by --head lm reads the "
                         "reference's text, with any language model")
    if not read_config(name).model_type.startswith("qwen"):
        raise InputError(f"{name}: a visual critic must be of the Qwen2-VL family")
    processor = load_processor(name)
    say(f"a visual critic; images are scaled to at most {processor.image_processor.size['longest_edge']:,} pixels")
    return processor


# ---------------------------------------------------------------------------------------------------------------------
# a user simulator

@torch.no_grad()
def vision_reply(model, processor, messages, max_new_tokens):
    """The likeliest Reply of a vision-language model (load_vision) to messages whose contents are lists of
    {"type": "text", "text"} and {"type": "image", "path" or "image"}."""
    from transformers import GenerationConfig
    messages = plain_chat(processor.tokenizer, messages)
    inputs = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True,
                                           return_tensors="pt").to(model.device, model.dtype)
    stops, length = stop_ids(model, processor.tokenizer), inputs["input_ids"].shape[1]
    # every field that a model's own generation_config may set
    config = GenerationConfig(do_sample=False, temperature=None, top_k=None, top_p=None, num_beams=1,
                              repetition_penalty=1.0, no_repeat_ngram_size=0, max_new_tokens=max_new_tokens,
                              eos_token_id=stops, pad_token_id=stops[0])
    ids = model.generate(**inputs, generation_config=config)[0, length:].tolist()
    return Reply(decode(processor.tokenizer, ids), ids[-1] in stops, ids, length, len(ids))


# ---------------------------------------------------------------------------------------------------------------------
# the visual critic

class Sight(NamedTuple):
    """What a visual critic needs beside its scorer."""

    processor: object               # load_processor's
    domain: object                  # its `views` and NOUN
    show: Callable                  # documents -> {document: image file, None where it cannot be rendered}; all ranks


def views_of(sight, task, history, sees_c):
    """The view of the last turn of a dialogue, the agent's. sees_c: c is shown, too."""
    return tuple(sight.domain.views(task, history, sees_c))


def turn_rows(sight, trajectories, sees_c):
    """Of each trajectory a list of rows, one for each agent turn."""
    views = []
    for trajectory in trajectories:
        task, history = trajectory["task"], trajectory["dialogue_history"]
        views.append([views_of(sight, task, history[:place + 1], sees_c) for place in agent_places(history)])
    row_of = view_rows(sight, views)
    return [list(map(row_of.get, turn_views)) for turn_views in views]


def action_views(sight, points, sees_c):
    """What each action of some common.DecisionPoints would show: of each point a list of views."""
    views = []
    for point in points:
        actions = [{"role": "assistant", "content": text} for text in point.texts]
        views.append([views_of(sight, point.task, [*point.history, action], sees_c) for action in actions])
    return views


def documents_of(views):
    """All documents that some lists of views show, each once."""
    documents = []
    for view in itertools.chain(*views):
        documents += [document for _, document in view if document]
    return list(dict.fromkeys(documents))


def view_rows(sight, views):
    """{view: row} of some lists of views."""
    files = sight.show(documents_of(views))
    rows = {}
    for view in itertools.chain(*views):
        if view not in rows:
            rows[view] = image_row(sight.processor, view, files)
    return rows


def image_row(processor, view, files):
    """The row that shows a view. An image's place in the chat becomes as many tokens as it has.
    files: {document: image file}."""
    images = tuple(files.get(document) for _, document in view)
    content = []
    for caption, _ in view:
        content += [{"type": "text", "text": caption}, {"type": "image"}]
    chat = [{"role": "user", "content": content}]
    text, *rest = render_chat(processor, chat).split(processor.image_token)
    for image, more in zip(images, rest, strict=True):
        width, height = open_image(image).size
        patches = processor.image_processor.get_number_of_image_patches(height, width, {})
        text += processor.image_token * (patches // processor.image_processor.merge_size ** 2) + more
    return encode(processor.tokenizer, text), images


def open_image(path):
    """The image in a file; None: a black one."""
    from PIL import Image
    return Image.open(path) if path else Image.new("RGB", BLACK)


def read_images(processor, paths):
    """{"pixel_values": (patches of all, values), "image_grid_thw": (number, 3)} of image files."""
    read = {path: processor.image_processor(open_image(path), return_tensors="pt") for path in dict.fromkeys(paths)}
    pixels = torch.cat([read[path]["pixel_values"] for path in paths])
    grids = torch.cat([read[path]["image_grid_thw"] for path in paths])
    return {"pixel_values": pixels, "image_grid_thw": grids}


def hidden_states(model, processor, batch):
    """The last hidden state of each token, (R, T, H), of a batch (collate) whose rows show images. The model
    gives their tokens positions in rows and columns."""
    pixels = read_images(processor, batch.images)
    tensors = {name: values.to(batch.ids.device) for name, values in pixels.items()}
    is_image = (batch.ids == model.config.image_token_id).int()
    output = model.base_model(input_ids=batch.ids, mm_token_type_ids=is_image, use_cache=False, **tensors)
    return output.last_hidden_state
