package edgelimit

import (
	"errors"
	"slices"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/caddyserver/caddy/v2"
)

// resolvedTotal counts resolutions in this process. No label ever comes from a
// request.
var resolvedTotal [sources][reasons]atomic.Uint64

// unresolvedDenials counts what the option unresolved denied, which is under no
// limit's name.
var unresolvedDenials counters

// storeErrors counts what kept a shared store from answering, in the order of
// StoreErrorKinds.
var storeErrors = make([]atomic.Uint64, len(StoreErrorKinds))

func countStoreErrors(kind string, n int) {
	if i := slices.Index(StoreErrorKinds, kind); i >= 0 {
		storeErrors[i].Add(uint64(n))
	}
}

// storeSeconds is how long calls of a shared store take.
var storeSeconds = prometheus.NewHistogram(prometheus.HistogramOpts{
	Name:    "caddy_edge_limit_store_seconds",
	Help:    "How long calls of the store took, also those that failed.",
	Buckets: []float64{.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25},
})

// collector shows the process's counters. Caddy makes a registry for each
// configuration; the counters are the process's and go on counting, and the
// series of a limit go when the limit goes.
type collector struct{}

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("caddy_edge_limit_"+name, help, labels, nil)
}

var (
	requestsDesc    = desc("requests_total", "Requests that a limit, an in_flight or a ceiling judged, by outcome.", "name", "outcome")
	resolvedDesc    = desc("resolved_total", "Requests by how their client was resolved, and why it was not or is in doubt.", "source", "reason")
	keysDesc        = desc("keys", "Keys that a limit remembers.", "name")
	forgottenDesc   = desc("forgotten_total", "Keys that a limit forgot because it was full, by whether they owed something.", "name", "indebted")
	topShareDesc    = desc("top_key_share", "The share of a limit's recent traffic that its most frequent key makes up.", "name")
	ceilingDesc     = desc("ceiling_used_ratio", "How much of a ceiling's count the current window has used.", "name")
	inFlightDesc    = desc("in_flight", "Requests that are being answered at the moment.", "name")
	storeErrorsDesc = desc("store_errors_total", "What kept the store from answering, and values in it that were not ours.", "kind")
	storeStateDesc  = desc("store_state", "1 for the state that the store is in, 0 for all others.", "state")
)

// Describe implements prometheus.Collector.
func (collector) Describe(descs chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{requestsDesc, resolvedDesc, keysDesc, forgottenDesc, topShareDesc, ceilingDesc, inFlightDesc, storeErrorsDesc, storeStateDesc} {
		descs <- d
	}
	storeSeconds.Describe(descs)
}

// Collect implements prometheus.Collector.
func (collector) Collect(metrics chan<- prometheus.Metric) {
	send := func(desc *prometheus.Desc, kind prometheus.ValueType, value float64, labels ...string) {
		metrics <- prometheus.MustNewConstMetric(desc, kind, value, labels...)
	}
	// by name: while two configurations overlap, one name can be of two kinds
	requests := map[string]*[outcomes]uint64{}
	addOutcomes := func(c *counters, name string) {
		if requests[name] == nil {
			requests[name] = new([outcomes]uint64)
		}
		for outcome := range outcomes {
			requests[name][outcome] += c.count(outcome)
		}
	}
	for source := range sources {
		for reason := range reasons {
			if n := resolvedTotal[source][reason].Load(); n > 0 {
				send(resolvedDesc, prometheus.CounterValue, float64(n), source.String(), reason.String())
			}
		}
	}
	stores := map[string]int{} // two, while configurations with different ones overlap
	addOutcomes(&unresolvedDenials, unresolvedName)
	states.Range(func(key, state any) bool {
		name := key.(stateKey).name
		switch state := state.(type) {
		case *limitState:
			addOutcomes(&state.counters, name)
			debts := state.ledger.Load()
			debtFree, indebted := debts.Forgotten()
			send(keysDesc, prometheus.GaugeValue, float64(debts.Len()), name)
			send(forgottenDesc, prometheus.CounterValue, float64(debtFree), name, "false")
			send(forgottenDesc, prometheus.CounterValue, float64(indebted), name, "true")
			top, _ := state.traffic.sketch.Top()
			send(topShareDesc, prometheus.GaugeValue, top.Share, name)
		case *ceilingState:
			addOutcomes(&state.counters, name)
			send(ceilingDesc, prometheus.GaugeValue, state.usedRatio(clock()), name)
		case *inFlightState:
			addOutcomes(&state.counters, name)
			send(inFlightDesc, prometheus.GaugeValue, float64(state.running.inFlight()), name)
		case *fleet:
			stores[state.report().State]++
		}
		return true
	})
	if len(stores) > 0 {
		for _, state := range storeStates {
			send(storeStateDesc, prometheus.GaugeValue, float64(stores[state]), state)
		}
		for i, kind := range StoreErrorKinds {
			send(storeErrorsDesc, prometheus.CounterValue, float64(storeErrors[i].Load()), kind)
		}
		storeSeconds.Collect(metrics)
	}
	for name, counted := range requests {
		for outcome, n := range counted {
			send(requestsDesc, prometheus.CounterValue, float64(n), name, outcomeNames[outcome])
		}
	}
}

// registerMetrics makes the counters visible in the registry of a configuration.
func registerMetrics(ctx caddy.Context) error {
	registry := ctx.GetMetricsRegistry()
	if registry == nil {
		return nil
	}
	err := registry.Register(collector{})
	if errors.As(err, new(prometheus.AlreadyRegisteredError)) {
		return nil
	}
	return err
}
