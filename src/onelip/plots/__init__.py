"""Pictures of runs, certifications, audits and attacks, as matplotlib figures. Needs `pip install 'onelip[plots]'`.

    found = onelip.certify(plain, images, labels)
    onelip.plots.certified_accuracy(found).savefig("curve.png")

Where a function takes a run, this is the path of a run directory or a `LoadedRun`; its test images are certified then,
which takes as long as `onelip certify`. `onelip report` draws the same figures on one page.
"""

from typing import TYPE_CHECKING

from onelip.core.imports import lazy_names

if TYPE_CHECKING:
    from onelip.plots.charts import (
        accuracies as accuracies,
        certified_accuracy as certified_accuracy,
        confusion as confusion,
        radii as radii,
        singular_values as singular_values,
        spectra as spectra,
        training_curves as training_curves,
    )
    from onelip.plots.pictures import (
        adversarial_images as adversarial_images,
        jtj as jtj,
        robust_images as robust_images,
    )

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
