"""Models as graphs: FlowBuilder records verbs, wiring makes a plan of nodes, and a Graph (an nn.Module) runs it."""
