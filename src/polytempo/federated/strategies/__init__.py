"""The federated strategies: each a few lines over a round of clients, with the paper that it comes from."""

from polytempo.core.calls.typed_arguments import typed
from polytempo.federated.strategies.fed_adagrad import fed_adagrad
from polytempo.federated.strategies.fed_adam import fed_adam
from polytempo.federated.strategies.fed_avg import fed_avg
from polytempo.federated.strategies.fed_avg_m import fed_avg_m
from polytempo.federated.strategies.fed_bn import fed_bn
from polytempo.federated.strategies.fed_buff import fed_buff
from polytempo.federated.strategies.fed_coded import fed_coded
from polytempo.federated.strategies.fed_nova import fed_nova
from polytempo.federated.strategies.fed_prox import fed_prox
from polytempo.federated.strategies.fed_rep import fed_rep
from polytempo.federated.strategies.fed_robust import fed_robust
from polytempo.federated.strategies.fed_yogi import fed_yogi
from polytempo.federated.strategies.q_fed_avg import q_fed_avg
from polytempo.federated.strategies.scaffold import scaffold
from polytempo.federated.strategies.secure import secure

__all__ = [
    "fed_adagrad",
    "fed_adam",
    "fed_avg",
    "fed_avg_m",
    "fed_bn",
    "fed_buff",
    "fed_coded",
    "fed_nova",
    "fed_prox",
    "fed_rep",
    "fed_robust",
    "fed_yogi",
    "q_fed_avg",
    "scaffold",
    "secure",
]

globals().update({name: typed(globals()[name]) for name in __all__})
