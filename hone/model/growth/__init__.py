"""Growth: the weights of a larger model made of a smaller one's, from which its training starts. One file per technique."""

from hone.base.table import Table

GROWTHS = Table(
    "growth",
    {
        "stack": "hone.model.growth.stack:Stack",
        "block_expansion": "hone.model.growth.block_expansion:BlockExpansion",
        "net2net": "hone.model.growth.net2net:Net2Net",
        "bert2bert": "hone.model.growth.bert2bert:Bert2BERT",
        "zero_expansion": "hone.model.growth.zero_expansion:ZeroExpansion",
        "upcycle": "hone.model.growth.upcycle:Upcycle",
    },
)
