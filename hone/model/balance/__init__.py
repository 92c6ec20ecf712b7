"""What keeps the experts of a mixture equally busy: losses, and a bias of the choice. One file per technique."""

from hone.base.table import Table

BALANCES = Table(
    "balance",
    {
        "aux_loss": "hone.model.balance.aux_loss:AuxLoss",
        "sequence_loss": "hone.model.balance.sequence_loss:SequenceLoss",
        "device_loss": "hone.model.balance.device_loss:DeviceLoss",
        "communication_loss": "hone.model.balance.communication_loss:CommunicationLoss",
        "z_loss": "hone.model.balance.z_loss:ZLoss",
        "bias": "hone.model.balance.bias:Bias",
    },
)
