"""Model files: folders and tokenizers of any model, and the models that are installed with the
package.
"""

from atts.models.embedded import EMBEDDED, Drafter, Embedded, ModelInfo, info, path, scores_path

__all__ = ["EMBEDDED", "Drafter", "Embedded", "ModelInfo", "info", "path", "scores_path"]
