// Command perrequest is a Caddy with a handler that asks Redis about each request
// through redis_rate, once for each limit.
package main

import (
	"errors"
	"math"
	"net/http"
	"strconv"
	"time"

	"github.com/go-redis/redis_rate/v10"
	"github.com/redis/go-redis/v9"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	_ "github.com/caddyserver/caddy/v2/modules/standard"
)

func init() {
	caddy.RegisterModule(handler{})
	httpcaddyfile.RegisterHandlerDirective("per_request", func(h httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
		m := new(handler)
		return m, m.UnmarshalCaddyfile(h.Dispenser)
	})
	httpcaddyfile.RegisterDirectiveOrder("per_request", httpcaddyfile.Before, "redir")
}

// handler limits each client's requests.
type handler struct {
	Address string         `json:"address"`
	Pool    int            `json:"pool"` // connections at most
	Rate    int            `json:"rate"`
	Period  caddy.Duration `json:"period"`
	Burst   int            `json:"burst"`
	Limits  int            `json:"limits"` // all with these numbers

	client  *redis.Client
	limiter *redis_rate.Limiter
	limit   redis_rate.Limit
	names   []string // of the limits, with which their keys begin
}

func (handler) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.per_request", New: func() caddy.Module { return new(handler) }}
}

// UnmarshalCaddyfile parses the line. Syntax:
//
//	per_request <address> <pool> <rate> <period> <burst> <limits>
func (h *handler) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next()
	var pool, rate, period, burst, limits string
	if !d.AllArgs(&h.Address, &pool, &rate, &period, &burst, &limits) {
		return d.ArgErr()
	}
	for _, number := range []struct {
		text string
		into *int
	}{{pool, &h.Pool}, {rate, &h.Rate}, {burst, &h.Burst}, {limits, &h.Limits}} {
		var err error
		if *number.into, err = strconv.Atoi(number.text); err != nil {
			return d.WrapErr(err)
		}
	}
	length, err := caddy.ParseDuration(period)
	if err != nil {
		return d.WrapErr(err)
	}
	h.Period = caddy.Duration(length)
	return nil
}

// Provision connects.
func (h *handler) Provision(caddy.Context) error {
	h.client = redis.NewClient(&redis.Options{Addr: h.Address, PoolSize: h.Pool})
	h.limiter = redis_rate.NewLimiter(h.client)
	h.limit = redis_rate.Limit{Rate: h.Rate, Period: time.Duration(h.Period), Burst: h.Burst}
	for i := range h.Limits {
		h.names = append(h.names, strconv.Itoa(i)+":")
	}
	return nil
}

// Cleanup ends the connections.
func (h *handler) Cleanup() error { return h.client.Close() }

func (h *handler) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	client, ok := caddyhttp.GetVar(r.Context(), caddyhttp.ClientIPVarKey).(string)
	if !ok {
		return caddyhttp.Error(http.StatusInternalServerError, errors.New("no client address"))
	}
	for _, name := range h.names {
		result, err := h.limiter.Allow(r.Context(), name+client, h.limit)
		if r.Context().Err() != nil {
			return nil // the client has gone
		}
		if err != nil {
			return caddyhttp.Error(http.StatusInternalServerError, err)
		}
		if result.Allowed == 0 {
			// the answer that edge_limit gives
			w.Header().Set("Retry-After", strconv.Itoa(int(math.Ceil(result.RetryAfter.Seconds()))))
			w.WriteHeader(http.StatusTooManyRequests)
			return nil
		}
	}
	return next.ServeHTTP(w, r)
}

// Interface guards.
var (
	_ caddy.Provisioner           = (*handler)(nil)
	_ caddy.CleanerUpper          = (*handler)(nil)
	_ caddyfile.Unmarshaler       = (*handler)(nil)
	_ caddyhttp.MiddlewareHandler = (*handler)(nil)
)

func main() { caddycmd.Main() }
