"""Routers of mixtures of experts: which experts compute a token, with which weights. One file per router."""

from hone.base.table import Table

ROUTERS = Table(
    "router",
    {
        "softmax": "hone.model.routers.softmax:Softmax",
        "sigmoid": "hone.model.routers.sigmoid:Sigmoid",
        "switch": "hone.model.routers.switch:Switch",
        "gshard": "hone.model.routers.gshard:GShard",
        "hash": "hone.model.routers.hash:Hash",
        "expert_choice": "hone.model.routers.expert_choice:ExpertChoice",
        "soft": "hone.model.routers.soft:Soft",
    },
)
