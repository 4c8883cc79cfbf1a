//go:build !race

// The race detector finds a race in the early data of quic-go's client, which is
// not what is tested here.

package e2e

import (
	"crypto/tls"
	"net/http"
	"testing"

	"github.com/quic-go/quic-go/http3"
)

// Early data proves no address: it is answered with 425 and charged to nobody,
// and the client's library sends it again.
func TestEarlyData(t *testing.T) {
	needLoopbackNetwork(t)
	t.Parallel()
	app, addr := startUpstream(t), freeAddr(t)
	c := startCaddy(t, "", tlsSite(addr, `
		edge_limit {
			client connection
			limit per_client 100/1d
		}
		reverse_proxy `+app.addr))
	url := "https://localhost:" + portOf(addr)
	sessions := tls.NewLRUClientSessionCache(10)
	first := http3From(t, "127.0.0.5", sessions)
	get(t, first, url).wantClient(t, "127.0.0.5")
	first.Close()

	early := 0
	for range 10 {
		again := http3From(t, "127.0.0.5", sessions)
		r := request(t, url)
		r.Method = http3.MethodGet0RTT
		a := do(t, again, r)
		again.Close()
		switch a.status {
		case http.StatusTooEarly:
			early++
		case http.StatusOK:
			a.wantClient(t, "127.0.0.5")
		default:
			t.Fatalf("status %d", a.status)
		}
	}
	charged := c.metric(t, `caddy_edge_limit_requests_total{name="per_client",outcome="allowed"}`)
	t.Logf("%d of 10 requests came early", early)
	if charged != float64(11-early) || app.requests.Load() != int64(11-early) {
		t.Errorf("%v were charged and %d arrived, with %d too early of 11", charged, app.requests.Load(), early)
	}
	if early == 0 {
		t.Error("no request came as early data: the test proves nothing")
	}
}
