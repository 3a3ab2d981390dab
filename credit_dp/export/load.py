"""`credit_dp.load`: load a trained model from a file or a folder, ready to forecast."""

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from credit_dp.config import ModelConfig, OwnModelConfig
from credit_dp.config.model import MODELS, with_legacy_defaults
from credit_dp.errors import UserError
from credit_dp.export.file import ModelMetadata, read_trained
from credit_dp.export.forecaster import Forecaster, build_forecaster
from credit_dp.plugins import find_plugins, first_line, registration_hint


def load(path: str, device: str = "cpu") -> Forecaster:
    """Return the trained model of an exported file, of a checkpoint, or of a run's folder.

    No code in the file is executed: a model of your own needs its file or package, as in training.

    Raises:
        UserError: there is no model, it can't be read, or its kind is unknown.
    """
    trained = read_trained(path)
    config = build_model_config(path, trained.metadata)
    return build_forecaster(path, trained, config).to(device)


def build_model_config(where: str, metadata: ModelMetadata) -> ModelConfig:
    """Return the model's config, checked as on the command line.

    Raises:
        UserError: the kind of model is unknown, or has other keys.
    """
    known = MODELS | find_plugins(OwnModelConfig, MODELS)
    if metadata.kind not in known:
        raise UserError(
            f"{where}: needs the model {metadata.kind!r}, but only {', '.join(known)} are known."
            f"{registration_hint(OwnModelConfig.plugin_kind)}"
        )
    # Keys that are newer than the file get the behaviour that the model was trained with.
    keys = with_legacy_defaults(metadata.kind, metadata.keys)
    if any("${" in str(value) for value in keys.values()):
        # An interpolation could read the environment: `${oc.env:...}`.
        raise UserError(f"{where}: a key of its model has an interpolation, which is not allowed.")
    try:
        node = OmegaConf.merge(OmegaConf.structured(known[metadata.kind]), keys)
        config = OmegaConf.to_object(node)
    except OmegaConfBaseException as error:
        raise UserError(
            f"{where}: its model has keys that are unknown or invalid ({first_line(error)})."
        ) from error
    if not isinstance(config, ModelConfig):
        raise UserError(f"{where}: {metadata.kind} is not a model.")
    return config
