//! Guides, one page for each task. They are the files in `docs/guide/` of the repository.
//!
//! | page | after it you can |
//! | --- | --- |
//! | [`algorithms`] | choose the algorithm of a quota |
//! | [`rate_limits`] | set costs, plans, waiting and rollout of rate limits |
//! | [`keys`] | count by user, API key or address, also behind proxies and CDNs |
//! | [`responses`] | change the responses and header fields of the layers |
//! | [`order`] | put the layers of a service in the right order |
//! | [`storing_layers`] | keep a layer in a struct, return it from a function, or make it optional |
//! | [`recipes`] | copy a whole solution: login protection, plans, webhooks, leader election and others |
//! | [`locks`] | lock work across processes, and refuse late writes with a fence |
//! | [`idempotency`] | execute a request or an operation once |
//! | [`queues`] | run delayed jobs with retries in production |
//! | [`cache`] | cache values that all processes load once |
//! | [`redis`] | run and size Redis |
//! | [`kubernetes`] | set probes, and shut down and deploy without lost work |
//! | [`migrating`] | replace tower_governor, your own `INCR`, rslock or apalis |
//! | [`testing`] | test a service with its limits, without Redis and without waiting |
//! | [`troubleshooting`] | find the cause of a symptom |
//! | [`performance`] | reduce round trips and read the figures |
//! | [`guarantees`] | name the guarantees and their limits |
//! | [`comparison`] | compare Tollgate with other crates |

// In rustdoc a page is not a file. Markdown uses the first definition of a link, so the definitions here replace those at the end of each
// page.
macro_rules! links {
    () => {
        concat!(
            "[algorithms.md]: crate::guide::algorithms\n",
            "[algorithms.md#worst-case-and-memory]: crate::guide::algorithms#worst-case-and-memory\n",
            "[cache.md]: crate::guide::cache\n",
            "[comparison.md]: crate::guide::comparison\n",
            "[guarantees.md]: crate::guide::guarantees\n",
            "[idempotency.md#work-that-is-not-http]: crate::guide::idempotency#work-that-is-not-http\n",
            "[idempotency.md]: crate::guide::idempotency\n",
            "[keys.md]: crate::guide::keys\n",
            "[keys.md#keys-that-clients-can-make-up]: crate::guide::keys#keys-that-clients-can-make-up\n",
            "[keys.md#an-ingress-controller-in-kubernetes]: crate::guide::keys#an-ingress-controller-in-kubernetes\n",
            "[keys.md#cloudflare-in-front-of-nginx]: crate::guide::keys#cloudflare-in-front-of-nginx\n",
            "[keys.md#many-people-behind-one-address]: crate::guide::keys#many-people-behind-one-address\n",
            "[kubernetes.md#readiness-and-liveness]: crate::guide::kubernetes#readiness-and-liveness\n",
            "[kubernetes.md#terminationgraceperiodseconds]: crate::guide::kubernetes#terminationgraceperiodseconds\n",
            "[kubernetes.md]: crate::guide::kubernetes\n",
            "[locks.md#refuse-late-writes-with-a-fence-column]: crate::guide::locks#refuse-late-writes-with-a-fence-column\n",
            "[locks.md]: crate::guide::locks\n",
            "[migrating.md]: crate::guide::migrating\n",
            "[order.md]: crate::guide::order\n",
            "[performance.md]: crate::guide::performance\n",
            "[queues.md]: crate::guide::queues\n",
            "[rate_limits.md]: crate::guide::rate_limits\n",
            "[rate_limits.md#limits-in-a-file]: crate::guide::rate_limits#limits-in-a-file\n",
            "[rate_limits.md#try-a-limit-before-you-enforce-it]: crate::guide::rate_limits#try-a-limit-before-you-enforce-it\n",
            "[recipes.md]: crate::guide::recipes\n",
            "[recipes.md#plans-from-a-database-and-get-usage]: crate::guide::recipes#plans-from-a-database-and-get-usage\n",
            "[redis.md#persistence]: crate::guide::redis#persistence\n",
            "[redis.md#sizing]: crate::guide::redis#sizing\n",
            "[redis.md#the-rights-of-an-acl-user]: crate::guide::redis#the-rights-of-an-acl-user\n",
            "[redis.md#what-to-monitor]: crate::guide::redis#what-to-monitor\n",
            "[redis.md]: crate::guide::redis\n",
            "[responses.md]: crate::guide::responses\n",
            "[storing_layers.md]: crate::guide::storing_layers\n",
            "[testing.md]: crate::guide::testing\n",
            "[troubleshooting.md]: crate::guide::troubleshooting\n",
            "[benchmarks.md]: https://docs.rs/crate/tollgate/latest/source/docs/benchmarks.md\n",
            "[benchmarks.md#more-waiting-jobs]: https://docs.rs/crate/tollgate/latest/source/docs/benchmarks.md\n",
            "[benchmarks.md#what-it-costs]: https://docs.rs/crate/tollgate/latest/source/docs/benchmarks.md\n",
            "[bin]: https://docs.rs/crate/tollgate/latest/source/examples/src/bin\n",
            "[CHANGELOG.md]: https://docs.rs/crate/tollgate/latest/source/CHANGELOG.md\n",
            "[faults.md]: https://docs.rs/crate/tollgate/latest/source/docs/faults.md\n",
            include_str!("../docs/guide/algorithms.link"),
        )
    };
}

macro_rules! pages {
    ($($name:ident $file:literal)*) => {$(
        #[doc = links!()]
        #[doc = include_str!($file)]
        pub mod $name {}
    )*};
}

pages! {
    algorithms "../docs/guide/algorithms.md"
    cache "../docs/guide/cache.md"
    comparison "../docs/guide/comparison.md"
    guarantees "../docs/guide/guarantees.md"
    idempotency "../docs/guide/idempotency.md"
    keys "../docs/guide/keys.md"
    kubernetes "../docs/guide/kubernetes.md"
    locks "../docs/guide/locks.md"
    migrating "../docs/guide/migrating.md"
    order "../docs/guide/order.md"
    performance "../docs/guide/performance.md"
    queues "../docs/guide/queues.md"
    rate_limits "../docs/guide/rate_limits.md"
    recipes "../docs/guide/recipes.md"
    redis "../docs/guide/redis.md"
    responses "../docs/guide/responses.md"
    storing_layers "../docs/guide/storing_layers.md"
    testing "../docs/guide/testing.md"
    troubleshooting "../docs/guide/troubleshooting.md"
}
