"""The public names of this package, each with its home. `__init__.py` reads this file."""

from polytempo.compression.network.network_file import compressed_model as compressed_model
from polytempo.report.status.history import history as history
from polytempo.spec.batch_growth import geometric as geometric
from polytempo.spec.batch_growth import norm_test as norm_test
from polytempo.training.elastic.loop_state import ElasticState as ElasticState
from polytempo.training.federated.client_model import client_model as client_model
from polytempo.training.hooks.attached_models import no_sync as no_sync
from polytempo.training.hooks.handle import Handle as Handle
from polytempo.training.observe.similarity import linear_cka as linear_cka
from polytempo.training.observe.trained_model import TrainedModel as TrainedModel
from polytempo.training.observe.trained_model import trained_model as trained_model
from polytempo.training.observe.user_log import log_image as log_image
from polytempo.training.observe.user_log import log_text as log_text
from polytempo.training.observe.whole_checkpoint import checkpoint_model as checkpoint_model
from polytempo.training.own_loop.served_handle import ServedHandle as ServedHandle
from polytempo.training.parts.layer_plan import plan_layers as plan_layers
from polytempo.training.parts.split import place as place
from polytempo.training.pipeline.pipeline import Pipeline as Pipeline
from polytempo.training.smaller.compress import compress as compress
