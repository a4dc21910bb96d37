"""Who holds which chunks: the supervisor's index of one model and each replica's mirror of it.

`index` is the pure data structure, `actor` puts it on the network, `client` and `mirror` are a
replica's side. Needs xoscar; neither torch nor vllm nor xinference.
"""
