package edgelimit

import (
	"errors"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/caddyserver/caddy/v2"
)

// resolvedTotal counts resolutions in this process. No label ever comes from a
// request.
var resolvedTotal [sources][reasons]atomic.Uint64

// collector shows the process's counters. Caddy makes a registry for each
// configuration; the counters are the process's and go on counting, and the
// series of a limit go when the limit goes.
type collector struct{}

var (
	requestsDesc = prometheus.NewDesc("caddy_edge_limit_requests_total",
		"Requests that a limit or ceiling judged, by outcome.", []string{"name", "outcome"}, nil)
	resolvedDesc = prometheus.NewDesc("caddy_edge_limit_resolved_total",
		"Requests by how their client was resolved, and why it was not or is in doubt.", []string{"source", "reason"}, nil)
)

// Describe implements prometheus.Collector.
func (collector) Describe(descs chan<- *prometheus.Desc) {
	descs <- requestsDesc
	descs <- resolvedDesc
}

// Collect implements prometheus.Collector.
func (collector) Collect(metrics chan<- prometheus.Metric) {
	for source := range sources {
		for reason := range reasons {
			if n := resolvedTotal[source][reason].Load(); n > 0 {
				metrics <- prometheus.MustNewConstMetric(resolvedDesc, prometheus.CounterValue, float64(n), source.String(), reason.String())
			}
		}
	}
	states.Range(func(key, state any) bool {
		counted, ok := state.(interface{ count(outcome) uint64 })
		for outcome := range outcomes {
			if ok {
				metrics <- prometheus.MustNewConstMetric(requestsDesc, prometheus.CounterValue,
					float64(counted.count(outcome)), key.(stateKey).name, outcomeNames[outcome])
			}
		}
		return true
	})
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
