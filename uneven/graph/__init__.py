"""Models as graphs: FlowBuilder's verbs -> a plan of nodes -> a Graph, which is an nn.Module on torch.fx."""
