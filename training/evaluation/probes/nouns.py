"""Names of things, which a pretrained model expects behind "is" as little as any other; and names of people."""

_WORDS = """
anchor apple apron arrow basket beach bell bench blanket bottle bread bridge broom brush bucket butter button cabin
cactus camel candle carpet castle cave chain chair cherry chimney clock cloud coat coin copper cotton couch cow crane
crown cup curtain daisy desert diamond donkey door dragon drum eagle elephant engine feather fence ferry finger flag
flute forest fork fountain fox frog garden garlic ghost giraffe glove goat grape guitar hammer harbor hat helmet
honey horse island jacket jungle kettle kitchen kite knife ladder lamp lemon lion lizard lobster marble meadow melon
mirror monkey moon mountain mouse mushroom nail needle nest oak oven owl oyster paint palace panda parrot peach pearl
pencil penguin piano pillow pirate planet plum pond potato pumpkin puppet rabbit rainbow ribbon rice river rocket
roof rope rose saddle salmon sand scissors shark sheep shell shoe silk silver sister skull snake snow soap sock
spider spoon squirrel statue stove sugar sword table temple tent thumb thunder tiger tomato towel tower train tractor
trumpet tulip turtle umbrella valley vase velvet village violin volcano wagon walnut whale wheat wheel whistle window
wolf wool zebra
"""
NOUNS = tuple(_WORDS.split())

_NAMES = """
Adam Alice Amy Andrew Anna Anthony Barbara Brian Carol Charles Chris Clara Daniel David Diana Donald Edward Emily Emma
Eric Frank Fred George Grace Hannah Harry Helen Henry Ian Jack James Jane Jason Jim Joan Joe John Julia Karen Kate
Kevin Laura Lee Linda Lisa Louis Lucy Luke Maria Martin Mary Matt Max Michael Nancy Nick Oliver Oscar Paul Peter Philip
Rachel Rebecca Richard Robert Roger Ruth Sam Sara Scott Simon Sophie Steve Susan Thomas Tom Victor Walter William
"""
NAMES = tuple(_NAMES.split())
