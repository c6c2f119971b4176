"""Sentences, names and things of the drills. None of them is in a probe of `memmix eval`."""

from hf_memmix.training.evaluation.probes.tasks import Form

_FORMS = """
 The boat of{} is named = How is the boat of{} named?
 The key of{} is marked with a = What is the mark on the key of{}?
{} got a ticket with the word = Which word was on the ticket of{}?
 In the play{} is the = What is{} in the play?
 The table of{} has the sign of the = Which sign is on the table of{}?
 The number of{} is written next to the = Next to what is the number of{} written?
 The card of{} shows a picture of a = What is on the card of{}?
{} is known as the = As what is{} known?
 On the door of{} is a picture of a = What is on the door of{}?
 The sticker on the bag of{} is a = What is the sticker on the bag of{}?
 The answer of{} was = What was the answer of{}?
{} was asked to bring the = What was{} asked to bring?
{} has bought the = What has{} bought?
{} is hiding the = What is{} hiding?
{} was afraid of the = What was{} afraid of?
{} repaired the = What did{} repair?
{} was waiting for the = What was{} waiting for?
{} complained about the = What did{} complain about?
{} borrowed the = What did{} borrow?
{} had forgotten the = What had{} forgotten?
{} laughed at the = What did{} laugh at?
{} asked for the = What did{} ask for?
{} was given the = What was{} given?
{} broke the = What did{} break?
{} stole the = What did{} steal?
{} talked about the = What did{} talk about?
{} was proud of the = What was{} proud of?
{} took care of the = What did{} take care of?
{} paid for the = What did{} pay for?
{} made a film about the = What did{} make a film about?
{} stood behind the = What did{} stand behind?
{} cleaned the = What did{} clean?
{} sings about the = What does{} sing about?
{} pointed at the = What did{} point at?
{} won the = What did{} win?
{} measured the = What did{} measure?
 In the room of{} they put the = What did they put in the room of{}?
 Nobody but{} could lift the = What could nobody but{} lift?
 Everyone thanked{} for the = What did everyone thank{} for?
 For a whole year{} had kept the = What had{} kept for a whole year?
"""
FORMS = tuple(Form(*line.split(" = ")) for line in _FORMS.strip("\n").split("\n"))
# what stands before several questions; nothing is as likely as each of them
LEADS = ("", "\n\nTo sum up:", "\n\nWhat was said before:", "\n\nRemember:", "\n\nWhat we know:")

_NAMES = """
Aaron Abigail Agnes Albert Alex Alfred Angela Arthur Austin Beth Betty Brenda Bruce Carl Catherine Cynthia Deborah
Dennis Derek Diane Doris Douglas Dylan Edgar Edith Eleanor Eli Ellen Elliot Ernest Ethan Eva Evelyn Felix Fiona
Florence Gary Gavin Gerald Gloria Gordon Greg Harold Heather Hugh Irene Isaac Isabel Ivan Jake Janet Jeff Jenny Jeremy
Jesse Jill Jonathan Jordan Joseph Josh Judith Justin Keith Kenneth Kim Lawrence Leo Leon Lloyd Lydia Marcus Margaret
Marion Martha Melissa Molly Monica Nathan Neil Nicole Nora Norman Olivia Pamela Patricia Patrick Pauline Ralph Rita
Roland Ronald Ross Roy Russell Ryan Samuel Sandra Sean Sharon Sheila Shirley Sidney Stanley Stella Stephen Stuart
Sylvia Teresa Timothy Tony Tracy Ursula Valerie Vera Vernon Vincent Virginia Wayne Wendy
"""
NAMES = tuple(_NAMES.split())

_THINGS = """
acorn anvil axe badge bag ball balloon bamboo banana bandage barrel bat battery bean bear beard bee beetle belt
bicycle bird biscuit blade boat bone bonnet book boot bow bowl box bracelet branch brick buffalo bull bus butterfly
cabbage cage cake calendar camera cannon canoe card carrot cart cat cheese chest chicken chocolate church cigar clay
cliff coal coffee collar comb compass computer corn cradle crystal cushion deer desk dish dog doll dolphin drawer
dress duck dust ear egg elbow envelope farm fan fig fish flame flour flower fly foot fossil frame fur gate gift ginger
glass glue gold goose gown grass gun hair ham hand harp hawk hay hen herb hill hook horn hotel house ice ink iron
ivory jar jeep jewel juice kangaroo key lace lake lamb lantern leaf leather leg leopard letter lettuce lid lock log
magnet map mask mat meat medal milk mill mole moth motor mud mug mule napkin necklace net newspaper nut oil olive
onion orange orchid ox paper parcel park path pen pepper phone photo pie pig pigeon pill pin pine pipe pizza plate
pocket poem pony pot powder prison quilt radio rail razor ring robe robot rug ruler salad salt sauce scarf school seal
seed shelf shield ship shirt shop shovel skirt sofa song soup spade spear sponge stamp star stick stone street string
suit swan sweater tail tank tape tea telescope thread ticket tie tile tooth torch toy trail tray tree truck tunnel
turkey vest wall wallet watch water wax web well wine wire wood worm yacht yard
"""
THINGS = tuple(_THINGS.split())
