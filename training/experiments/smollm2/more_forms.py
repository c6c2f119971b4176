"""Hundreds of sentences for the drills: does a student that has learnt many of them write what it finds?

None of them is in a probe of `memmix eval`, and no verb either.
"""

from hf_memmix.training.evaluation.probes.tasks import Form

# past and infinitive of verbs that take a thing
_VERBS = """
admired/admire adored/adore arranged/arrange baked/bake balanced/balance blessed/bless bought/buy brought/bring
brushed/brush built/build buried/bury burned/burn carried/carry carved/carve caught/catch chased/chase checked/check
chose/choose collected/collect copied/copy counted/count covered/cover cracked/crack crushed/crush cut/cut
damaged/damage decorated/decorate delivered/deliver described/describe designed/design destroyed/destroy dipped/dip
discovered/discover dragged/drag dropped/drop dug/dig emptied/empty exchanged/exchange examined/examine
fetched/fetch filled/fill filmed/film fixed/fix folded/fold followed/follow found/find gathered/gather greased/grease
guarded/guard hated/hate heated/heat held/hold hid/hide hired/hire hit/hit hung/hang imagined/imagine
inherited/inherit inspected/inspect kept/keep kicked/kick kissed/kiss knew/know launched/launch lifted/lift
loaded/load loved/love made/make marked/mark mended/mend mentioned/mention missed/miss mixed/mix moved/move
named/name needed/need noticed/notice offered/offer opened/open ordered/order owned/own packed/pack painted/paint
passed/pass photographed/photograph placed/place planted/plant polished/polish praised/praise printed/print
protected/protect pulled/pull punched/punch pushed/push raised/raise recognised/recognise removed/remove
rented/rent replaced/replace reported/report rescued/rescue returned/return rolled/roll rubbed/rub saved/save
scratched/scratch served/serve shook/shake showed/show smelled/smell splashed/splash squeezed/squeeze
studied/study swapped/swap tested/test threw/throw tied/tie took/take touched/touch trusted/trust used/use
visited/visit wanted/want washed/wash watched/watch weighed/weigh wrapped/wrap
"""
# a sentence and its question
_FRAMES = (
    ("{{}} {past} the", "What did{{}} {verb}?"),
    (" In the evening{{}} {past} the", "What did{{}} {verb} in the evening?"),
    (" It is known that{{}} {past} the", "What is it known that{{}} {past}?"),
    ("{{}} never wanted to {verb} the", "What did{{}} never want to {verb}?"),
)
MORE_FORMS = tuple(
    Form(*(part.format(past=past, verb=verb) for part in frame))
    for past, verb in (pair.split("/") for pair in _VERBS.split())
    for frame in _FRAMES
)
