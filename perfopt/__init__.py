"""perfopt: a torch.compile backend that prices every decision by a roofline cost model."""
