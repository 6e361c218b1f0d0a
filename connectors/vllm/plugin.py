"""Registration by name: vLLM calls this in every process (`vllm.general_plugins`)."""

NAME = "EbbtideConnector"


def register() -> None:
    """Make the connector known by its name alone; MultiConnector looks its children up so.

    Cheap, and harmless when called again: vLLM loads its plugins in every process.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # vLLM has no public question for this and raises on a second registration.
    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "ebbtide.connectors.vllm", NAME)
