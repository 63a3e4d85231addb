"""Vision-language models: a user simulator that sees pages, and a visual critic.

A view, ((caption, document or None), …), is the visual critic's input for a turn (`views` of a domain)."""
import copy
import dataclasses
import itertools
from collections import namedtuple
from typing import Callable

import torch

from lib.load import from_pretrained, load_files, load_tokenizer, loading, read_config
from lib.logps import action_outputs, Batch, collate, HeadModel, load_trained
from lib.runtime import InputError, say
from lib.servers import Reply
from lib.statistics import agent_places
from lib.tokens import decode, encode, plain_chat, render_chat, stop_ids

MAX_PIXELS = 1280 * 28 * 28
BLACK = 56, 56                                  # size of the placeholder for a missing image


# ---------------------------------------------------------------------------------------------------------------------
# loading

def load_processor(name):
    """A vision-language model's tokenizer, chat template and image processor in one. Qwen2-VL's is built without the
    video processor, which needs torchvision, and scales images down to at most MAX_PIXELS."""
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
        raise InputError(f"{name}: sees no images; name a vision-language model (e.g. Qwen2-VL)")
    model = load_files(transformers.AutoModelForImageTextToText, name, getattr(torch, dtype))
    return model.to(device).eval(), load_processor(name)


def critic_processor(name, score, domain, path):
    """The processor of a model that is trained as a visual critic. Raises InputError if it cannot be one.
    score: --score. path: of the domain's trajectories."""
    if not domain.views:
        raise InputError(f"{name}: a vision-language model cannot be the critic of a {domain.NOUN} ({path}): it has no "
                         "rendered view; name a language model")
    if score == "logratio":
        raise InputError(f"{name}: a vision-language model needs --score regression (or value); --score logratio needs "
                         "a language model, which reads the text of the solution")
    if not read_config(name).model_type.startswith("qwen"):
        raise InputError(f"{name}: a visual critic must be of the Qwen2-VL family")
    processor = load_processor(name)
    say(f"a visual critic; images are scaled to at most {processor.image_processor.size['longest_edge']:,} pixels")
    return processor


# ---------------------------------------------------------------------------------------------------------------------
# a user simulator

@torch.no_grad()
def vision_reply(model, processor, messages, max_new_tokens):
    """The greedy Reply of a vision-language model (load_vision) to messages whose contents are lists of
    {"type": "text", "text"} and {"type": "image", "path" or "image"}."""
    from transformers import GenerationConfig
    messages = plain_chat(processor.tokenizer, messages)
    inputs = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True,
                                           return_tensors="pt").to(model.device, model.dtype)
    stops, length = stop_ids(model, processor.tokenizer), inputs["input_ids"].shape[1]
    # sets every field that the model's own generation_config may set
    config = GenerationConfig(do_sample=False, temperature=None, top_k=None, top_p=None, num_beams=1,
                              repetition_penalty=1.0, no_repeat_ngram_size=0, max_new_tokens=max_new_tokens,
                              eos_token_id=stops, pad_token_id=stops[0])
    ids = model.generate(**inputs, generation_config=config)[0, length:].tolist()
    return Reply(decode(processor.tokenizer, ids), ids[-1] in stops, ids, length, len(ids))


# ---------------------------------------------------------------------------------------------------------------------
# the visual critic: a head on all tokens of a view

# A sequence with images; all of its tokens are one action. images: their files (None: a black image)
VisualSequence = namedtuple("VisualSequence", "ids action_ids prompt_length images")
VisualBatch = namedtuple("VisualBatch", (*Batch._fields, "images"))      # images: of all sequences, in their order


class VisualHeadModel(HeadModel):
    """A model of the Qwen2-VL family with a head, on batches of VisualSequences."""

    open_model = staticmethod(load_vision)

    def __init__(self, model):
        super().__init__(model)
        self.processor = load_processor(model.name_or_path)

    def check_positions(self, items):
        """Nothing to check: images are numbered in rows and columns."""

    def collate(self, items, device):
        images = [image for item in items for sequence in item for image in sequence.images]
        return VisualBatch(*collate(items, device), images)

    def hidden_states(self, batch):
        """Last hidden states (R, T, H). The model numbers the tokens of images in rows and columns."""
        pixels = read_images(self.processor, batch.images)
        tensors = {name: values.to(batch.ids.device) for name, values in pixels.items()}
        is_image = (batch.ids == self.model.config.image_token_id).int()
        output = self.model.base_model(input_ids=batch.ids, mm_token_type_ids=is_image, use_cache=False, **tensors)
        return output.last_hidden_state                                                   # (R, T, H)


@dataclasses.dataclass(eq=False)
class VisualCritic:
    """A critic that is shown pages. It has the methods of common.TextCritic that 02 and 04 call.

    score       "regression" or "value", what its head was trained for
    domain      its `views` select what is shown
    show        documents -> {document: image file, None if it cannot be rendered}; on all ranks
    tokenizer   the model's processor, which has a tokenizer; None: load() sets it"""

    folder: str
    score: str
    domain: object
    show: Callable
    critic_sees_c: bool = True
    tokenizer: object = None
    model_class = VisualHeadModel

    def prompt(self, prompt, task, sees_c):
        """The agent's prompt, unchanged: this critic does not read it."""
        return prompt

    def view(self, task, history, sees_c):
        """The view of the agent's turn at the end of a history."""
        return tuple(self.domain.views(task, history, sees_c))

    def trajectory_items(self, trajectories, sees_c):
        """An item for each trajectory; its actions are the agent's turns."""
        views = []
        for trajectory in trajectories:
            task, history = trajectory["task"], trajectory["dialogue_history"]
            views.append([self.view(task, history[:place + 1], sees_c) for place in agent_places(history)])
        sequence_of = self.view_sequences(views)
        items = []
        for turn_views in views:
            item = []
            for number, view in enumerate(turn_views):
                sequence = sequence_of[view]
                item.append(sequence._replace(action_ids=[number] * len(sequence.ids)))
            items.append(item)
        return items

    def action_views(self, states):
        """The view of each action of States: a list of views for each state."""
        views = []
        for state in states:
            actions = [{"role": "assistant", "content": text} for text in state.texts]
            views.append([self.view(state.task, [*state.history, action], self.critic_sees_c) for action in actions])
        return views

    def score_actions(self, states):
        """The advantage of each action of States, a list of floats for each state. Equal views are scored once."""
        views = self.action_views(states)
        sequences = self.view_sequences(views)
        items = [[sequence] for sequence in sequences.values()]
        outputs = action_outputs(self.model, items, self.max_tokens)                          # (1,) of each item
        advantage_of = {view: output.item() for view, output in zip(sequences, outputs)}
        return [[advantage_of[view] for view in state_views] for state_views in views]

    def view_sequences(self, views):
        """{view: its sequence} for some lists of views."""
        files = self.show(documents_of(views))
        sequences = {}
        for view in itertools.chain(*views):
            if view not in sequences:
                sequences[view] = image_sequence(self.tokenizer, view, files)
        return sequences

    async def seeing(self, states, environment):
        """Prepare for score_actions(states): a copy of this critic with the images, rendered by an environment."""
        files = await environment.show(documents_of(self.action_views(states)))
        critic = copy.copy(self)
        critic.show = lambda documents: files
        return critic

    def load(self, open_model, max_tokens):
        """As in LogRatioCritic."""
        self.max_tokens = max_tokens
        self.model = load_trained(self.folder, open_model, VisualHeadModel)
        self.tokenizer = self.model.processor

    def check_tokenizer(self, tokenizer, agent):
        """Nothing to check: it does not read the agent's tokens."""

    def empty_prompts(self, task, history):
        """As in TextCritic."""
        return list(self.domain.views(task, history, self.critic_sees_c))

    def describe(self):
        return f"{self.folder}: scores are the outputs of its {self.score} head"


def documents_of(views):
    """All documents in some lists of views, each once."""
    documents = []
    for view in itertools.chain(*views):
        documents += [document for _, document in view if document]
    return list(dict.fromkeys(documents))


def image_sequence(processor, view, files):
    """The VisualSequence of a view, as action 0. Each image placeholder in the chat is repeated to the image's number
    of tokens. files: {document: image file}."""
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
    ids = encode(processor.tokenizer, text)
    return VisualSequence(ids, [0] * len(ids), None, images)


def open_image(path):
    """The image in a file; None: a black image."""
    from PIL import Image
    return Image.open(path) if path else Image.new("RGB", BLACK)


def read_images(processor, paths):
    """{"pixel_values": (patches of all images, values), "image_grid_thw": (images, 3)} of image files."""
    read = {path: processor.image_processor(open_image(path), return_tensors="pt") for path in dict.fromkeys(paths)}
    pixels = torch.cat([read[path]["pixel_values"] for path in paths])
    grids = torch.cat([read[path]["image_grid_thw"] for path in paths])
    return {"pixel_values": pixels, "image_grid_thw": grids}
