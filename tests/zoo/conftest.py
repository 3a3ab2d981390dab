from tests.zoo.torchvision_operators import prepare_torchvision

prepare_torchvision()
