package edgelimit

import (
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
)

// seriesOf gathers our metrics as a scrape does: by name and labels, as the text
// format writes them.
func seriesOf(t *testing.T, gatherer prometheus.Gatherer) map[string]float64 {
	t.Helper()
	families, err := gatherer.Gather()
	if err != nil {
		t.Fatalf("gathering: %v", err)
	}
	series := make(map[string]float64)
	for _, family := range families {
		if !strings.HasPrefix(family.GetName(), "caddy_edge_limit_") {
			continue
		}
		for _, metric := range family.GetMetric() {
			var labels []string
			for _, label := range metric.GetLabel() {
				labels = append(labels, fmt.Sprintf("%s=%q", label.GetName(), label.GetValue()))
			}
			name := family.GetName() + "{" + strings.Join(labels, ",") + "}"
			if _, before := series[name]; before {
				t.Errorf("%s comes twice", name)
			}
			series[name] = metric.GetCounter().GetValue() + metric.GetGauge().GetValue()
		}
	}
	return series
}

func requestsTotal(name string, o outcome) string {
	return fmt.Sprintf("caddy_edge_limit_requests_total{name=%q,outcome=%q}", name, outcomeNames[o])
}

func resolvedTotalOf(by source, why reason) string {
	return fmt.Sprintf("caddy_edge_limit_resolved_total{reason=%q,source=%q}", why, by)
}

// Each outcome of each name, by its name alone.
func TestMetricsOfRequests(t *testing.T) {
	i := newInstance(t, `{
	edge_limit {
		client {
			trusted_proxies static 10.0.0.0/8
		}
	}
}
http://test.local {
	edge_limit {
		limit visits 3/h {
			exempt 192.0.2.0/24
		}
		limit trial 2/h {
			observe
		}
		in_flight running 100
		ceiling top 20/h
	}
	respond ok
}`)
	i.passed(10, alice, "/")
	i.passed(4, "192.0.2.1", "/")
	i.passed(2, bob, "/")
	got := seriesOf(t, i.ctx.GetMetricsRegistry())
	for _, row := range []struct {
		name    string
		outcome outcome
		want    float64
	}{
		{"visits", outcomeAllowed, 3 + 2},
		{"visits", outcomeDenied, 7},
		{"visits", outcomeWouldDeny, 0},
		{"visits", outcomeExempt, 4},
		{"trial", outcomeAllowed, 2 + 2 + 2},
		{"trial", outcomeDenied, 0},
		{"trial", outcomeWouldDeny, 1 + 2}, // of the first client's only the one that the other limit let pass
		{"trial", outcomeExempt, 0},
		{"running", outcomeAllowed, 3 + 4 + 2},
		{"running", outcomeDenied, 0},
		{"top", outcomeAllowed, 3 + 4 + 2},
		{"top", outcomeDenied, 0},
		{"top", outcomeWouldDeny, 0},
		{"top", outcomeExempt, 0},
	} {
		value, ok := got[requestsTotal(row.name, row.outcome)]
		if !ok {
			t.Errorf("%s is missing in %v", requestsTotal(row.name, row.outcome), slices.Sorted(maps.Keys(got)))
		}
		expect(t, value, row.want, requestsTotal(row.name, row.outcome))
	}
}

// Resolutions by source and reason. The counters are the process's, so the test
// looks at what is added.
func TestMetricsOfResolutions(t *testing.T) {
	i := newInstance(t, `http://test.local {
	edge_limit {
		client {
			trusted_proxies static 10.0.0.0/8
			hops 2
			proof Proxy-Authorization correct-horse-battery-staple
		}
	}
	respond ok
}`)
	before := seriesOf(t, i.ctx.GetMetricsRegistry())
	i.get(alice, "/")
	i.get(alice, "/")
	i.get("192.168.1.1", "/", "X-Forwarded-For: "+bob)
	i.get("10.0.0.1", "/")
	i.get("10.0.0.1", "/", "X-Forwarded-For: "+bob)
	i.get("10.0.0.1", "/", "X-Forwarded-For: "+bob+", 10.0.0.2")
	i.get("10.0.0.1", "/", "X-Forwarded-For: "+alice+", "+bob)
	i.get("10.0.0.1", "/", "X-Forwarded-For: hello, 10.0.0.2")
	i.get(alice, "/", "Proxy-Authorization: correct-horse-battery-staple", "X-Client-IP: "+bob)
	i.get("@", "/")
	after := seriesOf(t, i.ctx.GetMetricsRegistry())
	added := make(map[string]float64)
	for name, value := range after {
		if value != before[name] {
			added[name] = value - before[name]
		}
	}
	want := map[string]float64{
		resolvedTotalOf(sourceConnection, reasonNone):            2,
		resolvedTotalOf(sourceConnection, reasonUntrustedHeader): 1,
		resolvedTotalOf(sourceUnresolved, reasonMissingHeader):   1,
		resolvedTotalOf(sourceUnresolved, reasonMalformed):       1,
		resolvedTotalOf(sourceUnresolved, reasonNoAddress):       1,
		resolvedTotalOf(sourceHops, reasonNone):                  1,
		resolvedTotalOf(sourceHops, reasonShortChain):            1,
		resolvedTotalOf(sourceHops, reasonUnverifiedHop):         1,
		resolvedTotalOf(sourceProof, reasonNone):                 1,
	}
	if !maps.Equal(added, want) {
		t.Errorf("added %v\nwant  %v", added, want)
	}
}

// No label ever comes from a request, and no number of requests adds a series.
func TestMetricLabelsComeFromConfiguration(t *testing.T) {
	i := newInstance(t, `http://test.local {
	edge_limit {
		client {
			trusted_proxies static 10.0.0.0/8
			proof X-Proof correct-horse-battery-staple
		}
		limit visits 3/h
		limit tenant 3/h {
			key client {http.request.header.X-Api-Key} {http.request.uri.path} {http.request.host}
		}
		ceiling top 10000/h
	}
	respond ok
}`)
	const mark = "hostile"
	send := func(n int) {
		evil := fmt.Sprintf("%s-%d\"} 1\nup{x=\"", mark, n)
		r := requestFrom([]string{alice, "10.0.0.1"}[n%2], fmt.Sprintf("/%s-%d?%s", mark, n, mark))
		r.Host = fmt.Sprintf("%s-%d.local", mark, n)
		r.Method = strings.ToUpper(mark)
		for _, name := range []string{
			"X-Api-Key", "X-Forwarded-For", "Forwarded", "X-Real-IP", "X-Proof", "X-Client-IP", "User-Agent", "Cookie", mark, "X-Request-Id",
		} {
			r.Header[http.CanonicalHeaderKey(name)] = []string{evil}
		}
		i.send(r)
		i.get(clientNumber(n), "/"+mark)
	}
	for n := range 4 {
		send(n)
	}
	before := seriesOf(t, i.ctx.GetMetricsRegistry())
	for n := range 1000 {
		send(n)
	}
	after := seriesOf(t, i.ctx.GetMetricsRegistry())
	if names := slices.Sorted(maps.Keys(after)); !slices.Equal(names, slices.Sorted(maps.Keys(before))) {
		t.Errorf("requests have added series: %v", names)
	}
	allowed := map[string][]string{
		"name":     {"visits", "tenant", "top", unresolvedName},
		"outcome":  outcomeNames[:],
		"source":   sourceNames[:],
		"reason":   reasonNames[:],
		"indebted": {"false", "true"},
	}
	families, err := i.ctx.GetMetricsRegistry().Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, family := range families {
		for _, metric := range family.GetMetric() {
			for _, label := range metric.GetLabel() {
				if strings.Contains(label.GetValue(), mark) || strings.Contains(label.GetValue(), "198.18.") || strings.Contains(label.GetValue(), alice) {
					t.Errorf("%s has the label %s=%q, which comes from a request", family.GetName(), label.GetName(), label.GetValue())
				}
				if values, ok := allowed[label.GetName()]; strings.HasPrefix(family.GetName(), "caddy_edge_limit_") && (!ok || !slices.Contains(values, label.GetValue())) {
					t.Errorf("%s has the label %s=%q, which is none of ours", family.GetName(), label.GetName(), label.GetValue())
				}
			}
		}
	}
}

// Counters never go down, whatever happens in between.
func TestMetricsAreMonotonic(t *testing.T) {
	i := newInstance(t, `http://test.local {
	edge_limit {
		limit visits 3/m {
			exempt 192.0.2.0/24
		}
		ceiling top 50/m
	}
	respond ok
}`)
	before := seriesOf(t, i.ctx.GetMetricsRegistry())
	for n := range 300 {
		i.get(clientNumber(n%7), "/")
		i.get("192.0.2.1", "/")
		if n%50 == 49 {
			i.sleep(1e9 * 30)
		}
		after := seriesOf(t, i.ctx.GetMetricsRegistry())
		for name, value := range before {
			if strings.Contains(name, "_total{") && after[name] < value {
				t.Fatalf("%s went from %v to %v", name, value, after[name])
			}
		}
		before = after
	}
}

// The rules that Prometheus has for names and help texts.
func TestMetricsLint(t *testing.T) {
	i := newInstance(t, "http://test.local {\nedge_limit {\nlimit visits 3/m\n}\nrespond ok\n}")
	i.get(alice, "/")
	families, err := i.ctx.GetMetricsRegistry().Gather()
	if err != nil {
		t.Fatal(err)
	}
	ours := families[:0:0]
	for _, family := range families {
		if strings.HasPrefix(family.GetName(), "caddy_edge_limit_") {
			ours = append(ours, family)
		}
	}
	if len(ours) < 2 {
		t.Fatalf("%d families", len(ours))
	}
	problems, err := promlint.NewWithMetricFamilies(ours).Lint()
	if err != nil {
		t.Fatal(err)
	}
	for _, problem := range problems {
		t.Errorf("%s: %s", problem.Metric, problem.Text)
	}
}

// Two configurations run side by side while one takes over from the other, which
// takes as long as the last connection of the old one. A scrape in that time must
// not fail, not even when a name has changed its kind: an error in one collector
// fails all of Caddy's metrics.
func TestMetricsWhileConfigurationsOverlap(t *testing.T) {
	old := newInstance(t, "http://test.local {\nedge_limit {\nlimit same 3/h\nlimit kind 3/h\n}\nrespond ok\n}")
	old.passed(5, alice, "/")
	next := newInstance(t, "http://test.local {\nedge_limit {\nlimit same 3/h\nceiling kind 3/h\n}\nrespond ok\n}")
	next.passed(5, bob, "/")
	for _, i := range []*instance{old, next} {
		got := seriesOf(t, i.ctx.GetMetricsRegistry())
		expect(t, got[requestsTotal("same", outcomeAllowed)], 6, "both configurations' requests")
	}
	old.stop()
	got := seriesOf(t, next.ctx.GetMetricsRegistry())
	expect(t, got[requestsTotal("same", outcomeAllowed)], 6, "the old one is gone, and what it counted stays")
}

// The metrics of a name go when its last user goes.
func TestMetricsGoWithTheirLimit(t *testing.T) {
	i := newInstance(t, "http://test.local {\nedge_limit {\nlimit stays 3/h\n}\nrespond ok\n}")
	other := newInstance(t, "http://test.local {\nedge_limit {\nlimit goes 3/h\nceiling leaves 3/h\n}\nrespond ok\n}")
	for o := range outcomes {
		for _, name := range []string{"stays", "goes", "leaves"} {
			_, ok := seriesOf(t, i.ctx.GetMetricsRegistry())[requestsTotal(name, o)]
			expect(t, ok, true, "before: "+requestsTotal(name, o))
		}
	}
	other.stop()
	for o := range outcomes {
		for name, there := range map[string]bool{"stays": true, "goes": false, "leaves": false} {
			_, ok := seriesOf(t, i.ctx.GetMetricsRegistry())[requestsTotal(name, o)]
			expect(t, ok, there, "after: "+requestsTotal(name, o))
		}
	}
}
