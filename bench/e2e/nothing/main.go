// Command nothing is a Caddy with a handler that only calls the next one, which
// is what any handler costs at least.
package main

import (
	"net/http"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	_ "github.com/caddyserver/caddy/v2/modules/standard"
)

func init() {
	caddy.RegisterModule(handler{})
	httpcaddyfile.RegisterHandlerDirective("nothing", func(httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
		return handler{}, nil
	})
	httpcaddyfile.RegisterDirectiveOrder("nothing", httpcaddyfile.Before, "redir")
}

type handler struct{}

func (handler) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.nothing", New: func() caddy.Module { return new(handler) }}
}

func (handler) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	return next.ServeHTTP(w, r)
}

func main() { caddycmd.Main() }
