"""`credit_dp.load`: a trained model from a file or a folder, ready to forecast."""

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from credit_dp.config import ModelConfig, OwnModelConfig
from credit_dp.config.model import with_legacy_defaults
from credit_dp.errors import UserError
from credit_dp.export.file import ModelMetadata, read_trained
from credit_dp.export.forecaster import Forecaster, build_forecaster
from credit_dp.plugins import find_plugins, first_line, registration_hint
from credit_dp.training.data_description import MODEL_KINDS


def load(path: str, device: str = "cpu") -> Forecaster:
    """Return the trained model of an exported file, of a checkpoint, or of a run's folder.

    Nothing in the file is executed: a model of your own has to be known by its file or package, as
    it was for training.

    Raises:
        UserError: there is none, it can't be read, or its model is not known.
    """
    trained = read_trained(path)
    config = build_model_config(path, trained.metadata)
    return build_forecaster(path, trained, config).to(device)


def build_model_config(where: str, contents: ModelMetadata) -> ModelConfig:
    """The model's config, checked as on the command line.

    Raises:
        UserError: nobody knows a model of this kind, or not with these keys.
    """
    known = MODEL_KINDS | find_plugins(OwnModelConfig, MODEL_KINDS)
    if contents.kind not in known:
        raise UserError(
            f"{where}: needs the model {contents.kind!r}, but only {', '.join(known)} are known."
            f"{registration_hint(OwnModelConfig.plugin_kind)}"
        )
    keys = with_legacy_defaults(contents.kind, contents.keys)
    if any("${" in str(value) for value in keys.values()):
        raise UserError(f"{where}: a key of its model holds an interpolation, which is not read.")
    try:
        node = OmegaConf.merge(OmegaConf.structured(known[contents.kind]), keys)
        config = OmegaConf.to_object(node)
    except OmegaConfBaseException as error:
        raise UserError(
            f"{where}: has a model with other keys than are known ({first_line(error)})."
        ) from error
    if not isinstance(config, ModelConfig):
        raise UserError(f"{where}: {contents.kind} is no model.")
    return config
