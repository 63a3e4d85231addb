"""Similarity of two screenshots: by CLIP embeddings (the paper's metric), or by colours and structure (no weights)."""
import functools

from colbench.schema import InputError

CLIP_MODEL = "openai/clip-vit-base-patch32"


class PageScorer:
    """Similarity in [0, 1] of the screenshots (PNG paths) of a solution and of an answer; .name is the metric.

    "clip": cosine of the image embeddings, clipped at 0; "pixels": see pixel_similarity. They are two scales.
    An answer without an image (None) counts as a black image of the solution's size. A solution without one gives 0.
    An image is read and embedded once."""

    def __init__(self, similarity, clip_model=CLIP_MODEL, device="cpu"):
        try:
            import PIL.Image  # noqa: F401
            if similarity == "pixels":
                import skimage.metrics  # noqa: F401
        except ImportError as error:
            raise InputError(f"pages need the package {error.name}: pip install -r scripts/frontend.txt") from None
        self.name = "pixels" if similarity == "pixels" else f"clip:{clip_model}"
        self.clip = None if similarity == "pixels" else load_clip(clip_model, device)
        self.embeddings = {}

    def score(self, pairs):
        return [self.score_one(solution, answer) if solution else 0.0 for solution, answer in pairs]

    def score_one(self, solution, answer):
        if self.clip:
            return min(1.0, max(0.0, float(self.embedding(solution) @ self.embedding(answer))))
        return pixel_similarity(small_image(solution), small_image(answer) if answer else None)

    def embedding(self, path):
        """The unit embedding (D,) of an image; None stands for a black one."""
        if path not in self.embeddings:
            import torch
            from PIL import Image
            model, processor = self.clip
            image = Image.open(path).convert("RGB") if path else Image.new("RGB", (224, 224))
            pixels = processor(image, return_tensors="pt")["pixel_values"].to(model.device)         # (1, 3, 224, 224)
            with torch.no_grad():
                embedding = model(pixel_values=pixels).image_embeds[0].double().cpu()
            self.embeddings[path] = torch.nn.functional.normalize(embedding, dim=0)
        return self.embeddings[path]


def load_clip(name, device):
    """(vision model, its image processor). If they cannot be loaded, raises InputError that names the other similarity.
    """
    from transformers import CLIPImageProcessorPil, CLIPVisionModelWithProjection
    try:
        processor = CLIPImageProcessorPil.from_pretrained(name)
        model, info = CLIPVisionModelWithProjection.from_pretrained(name, output_loading_info=True)
        if info["missing_keys"]:
            raise ValueError(f"its weights have no {min(info['missing_keys'])}")
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0].partition(". ")[0]
        raise InputError(f"--similarity clip: no CLIP weights could be loaded from {name} ({reason}); where the hub "
                            f"is in reach, run `hf download {CLIP_MODEL} --local-dir clip` and add --clip-model clip, "
                            "or choose --similarity pixels, which needs none") from None
    return model.to(device).eval(), processor


@functools.lru_cache(2000)
def small_image(path):
    """A screenshot at an eighth of its width and height, each pixel a mean of 64: (rows, columns, 3) uint8."""
    import numpy as np
    from PIL import Image
    return np.asarray(Image.open(path).convert("RGB").reduce(8))


def pixel_similarity(solution, answer):
    """Similarity in [0, 1] of two small images (rows, columns, 3) uint8, symmetric, 1 for equal ones; None is a black
    image of the solution's size. The mean of two parts:
    colours     sum of min over sum of max of the square roots of the two histograms (8 levels per channel). The roots
                give small areas, such as a header, more weight
    structure   SSIM (Wang et al., 2004) over the colour channels of the common area, at least 0, times the share of the
                common area: the part of one page that is below the end of the other matches nothing"""
    import numpy as np
    from skimage.metrics import structural_similarity
    if answer is None:
        answer = np.zeros_like(solution)
    roots = []
    for image in (solution, answer):
        levels = image.reshape(-1, 3) >> 5                          # (pixels, 3), each below 8
        counts = np.bincount(levels @ (64, 8, 1), minlength=512)
        roots.append(np.sqrt(counts))
    colours = np.minimum(*roots).sum() / np.maximum(*roots).sum()
    rows, columns, _ = np.minimum(solution.shape, answer.shape)
    all_rows, all_columns, _ = np.maximum(solution.shape, answer.shape)
    share = rows * columns / (all_rows * all_columns)
    structure = structural_similarity(solution[:rows, :columns], answer[:rows, :columns], channel_axis=2)
    return float(0.5 * colours + 0.5 * share * max(0.0, structure))
