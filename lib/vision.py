"""Vision-language models: the simulator that compares images, and the input of the visual critic."""
import torch

from lib.folders import check_template, render_chat
from lib.models import add_work, encode, from_pretrained, load_tokenizer, stop_ids
from lib.runtime import InputError, one_line
from lib.servers import Reply

MAX_PIXELS = 1280 * 28 * 28
BLACK = 56, 56                                  # width and height of what stands for an image that is not there


def load_processor(name):
    """A vision-language model's tokenizer, chat template and image processor in one. Qwen2-VL's is put together without
    the video processor, which needs torchvision, and scales images down to MAX_PIXELS, if not to fewer."""
    import transformers
    try:
        if not from_pretrained(transformers.AutoConfig, name).model_type.startswith("qwen"):
            processor = from_pretrained(transformers.AutoProcessor, name)
            if processor.chat_template:
                check_template(name, processor)
            return processor
        processor = type("Qwen2VLProcessor", (transformers.Qwen2VLProcessor,),
                         {"get_attributes": classmethod(lambda cls: ["image_processor", "tokenizer"])})
        tokenizer = load_tokenizer(name)
        images = from_pretrained(transformers.Qwen2VLImageProcessorPil, name)
        if images.size["longest_edge"] > MAX_PIXELS:
            images = from_pretrained(transformers.Qwen2VLImageProcessorPil, name, max_pixels=MAX_PIXELS)
        return processor(images, tokenizer, chat_template=tokenizer.chat_template)
    except ImportError as error:
        raise InputError(f"{name}: its processor needs more packages ({one_line(error)}): pip install -r "
                         "scripts/frontend.txt") from None


def check_visual_critic(args, domain):
    """InputError where a model that sees (--model) cannot be the critic of a domain, by the arguments of 03."""
    from transformers import AutoConfig
    if not domain.views:
        raise InputError(f"{args.model}: a model that sees can be no critic of {domain.NOUN}s ({args.trajectories}), "
                         "which have nothing to see; name a language model")
    if args.head == "lm":
        raise InputError(f"{args.model}: a model that sees needs --head regression (or value); one by --head lm reads "
                         "the reference's text, with any language model")
    if not from_pretrained(AutoConfig, args.model).model_type.startswith("qwen"):
        raise InputError(f"{args.model}: a visual critic must be of the Qwen2-VL family")


def load_vision(name, device, dtype="float32"):
    """(model, processor) of any vision-language model, for vision_reply."""
    import transformers
    if type(from_pretrained(transformers.AutoConfig, name)) not in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        raise InputError(f"{name}: sees no images; name a vision-language model (Qwen2-VL, say)")
    model = from_pretrained(transformers.AutoModelForImageTextToText, name, dtype=getattr(torch, dtype))
    return model.to(device).eval(), load_processor(name)


@torch.no_grad()
def vision_reply(model, processor, messages, max_new_tokens):
    """The likeliest Reply of a vision-language model (load_vision) to messages whose contents are lists of
    {"type": "text", "text"} and {"type": "image", "path" or "image"}."""
    from transformers import GenerationConfig
    inputs = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True,
                                           return_tensors="pt").to(model.device, model.dtype)
    stops, length = stop_ids(model, processor.tokenizer), inputs["input_ids"].shape[1]
    # every field that a model's own generation_config may set
    config = GenerationConfig(do_sample=False, temperature=None, top_k=None, top_p=None, num_beams=1,
                              repetition_penalty=1.0, no_repeat_ngram_size=0, max_new_tokens=max_new_tokens,
                              eos_token_id=stops, pad_token_id=stops[0])
    ids = model.generate(**inputs, generation_config=config)[0, length:].tolist()
    add_work(model, length)
    add_work(model, len(ids), generated=True)
    text = processor.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return Reply(text, ids[-1] in stops, ids, length, len(ids))


def hidden_states(model, processor, batch):
    """The last hidden state of each token, (R, T, H), of a batch (common.collate) whose rows show images. The model
    gives their tokens positions in rows and columns."""
    pixels = read_images(processor, batch.images)
    tensors = {name: values.to(batch.ids.device) for name, values in pixels.items()}
    is_image = (batch.ids == model.config.image_token_id).int()
    output = model.base_model(input_ids=batch.ids, mm_token_type_ids=is_image, use_cache=False, **tensors)
    return output.last_hidden_state


def documents_of(views):
    """All documents that some views show, each once. views: lists of what is shown of a turn, [(caption, document or
    None), …]."""
    documents = []
    for dialogue in views:
        for shown in dialogue:
            documents += [document for _, document in shown if document]
    return list(dict.fromkeys(documents))


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


def image_row(processor, views):
    """(ids, image files) of a chat of captions and images, [(caption, file or None for a black one), …]. An image's
    place in the chat becomes as many tokens as it has."""
    content = []
    for caption, _ in views:
        content += [{"type": "text", "text": caption.replace(processor.image_token, "")}, {"type": "image"}]
    text, *rest = render_chat(processor, [{"role": "user", "content": content}]).split(processor.image_token)
    for (_, path), more in zip(views, rest, strict=True):
        width, height = open_image(path).size
        patches = processor.image_processor.get_number_of_image_patches(height, width, {})
        text += processor.image_token * (patches // processor.image_processor.merge_size ** 2) + more
    return encode(processor.tokenizer, text), tuple(path for _, path in views)
